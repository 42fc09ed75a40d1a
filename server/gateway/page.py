"""The status page at `/`: one static file that reads /health and /metrics and chats through /v1, as any client does."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).parents[1] / "static" / "index.html"


def policy(page: str) -> str:
    """The page's content security policy (W3C CSP 3): its own script and style by their hashes, and nothing else.

    Widths of bars are set through the DOM, which the policy allows; an inline `style` attribute it would not.
    """
    hashes = {tag: _hash(re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)) for tag in ("script", "style")}
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(blocks: list[str]) -> str:
    digests = (hashlib.sha256(block.encode("utf-8")).digest() for block in blocks)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)


def status_page() -> Response:
    """The page as a response, which may be sent any number of times."""
    page = PAGE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, media_type="text/html", headers=headers)
