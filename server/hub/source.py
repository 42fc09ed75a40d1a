"""Where a model comes from: `hf:OWNER/NAME[@REVISION]`, `modelscope:OWNER/NAME[@REVISION]`, or a directory's URL."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from server.errors import HubError

Kind = Literal["hf", "modelscope", "url"]

# Where a kind's files are by default, and the variables with another place and with a token.
ENDPOINTS: Mapping[str, str] = {"hf": "https://huggingface.co", "modelscope": "https://www.modelscope.cn"}
ENDPOINT_VARIABLES: Mapping[str, str] = {"hf": "HF_ENDPOINT", "modelscope": "MODELSCOPE_ENDPOINT"}
TOKEN_VARIABLES: Mapping[str, str] = {"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN", "url": ""}

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,199}", re.ASCII)
_TOKEN = re.compile(r"[!-~]{1,4096}")
_FORM = "hf:OWNER/NAME[@REVISION], modelscope:OWNER/NAME[@REVISION] or https://HOST/FOLDER/"


@dataclass(frozen=True)
class Source:
    """A model on a hub. `name`: OWNER/NAME, or the directory's URL. `revision`: as asked for; "" for the newest.

    `token` is in no text that is made of a source.
    """

    kind: Kind
    name: str
    revision: str = ""
    endpoint: str = ""
    token: str = field(default="", repr=False)

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return shown_url(self.name) if self.kind == "url" else f"{self.kind}:{self.name}{at}"

    def at(self, revision: str) -> "Source":
        """The same model at another revision."""
        return replace(self, revision=revision)


def is_remote(text: str) -> bool:
    """Whether a command's argument names a model on a hub, and not a directory."""
    return text.startswith(("hf:", "modelscope:", "http://", "https://"))


def parse_source(
    text: str, endpoint: str = "", token_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Source:
    """The source that `text` names, with its endpoint and token. Raises HubError for a malformed one."""
    environ = os.environ if environ is None else environ
    if text.startswith(("http://", "https://")):
        if endpoint:
            raise HubError(
                f"--endpoint: expected none beside a URL, got {shown_url(endpoint)}; the URL names the place"
            )
        return Source("url", _checked_url(text, "URL").rstrip("/") + "/", token=_token("url", token_file, environ))
    kind_text, _, rest = text.partition(":")
    kind: Kind = "modelscope" if kind_text == "modelscope" else "hf"
    name, at, revision = rest.partition("@")
    if kind_text != kind or not _NAME.fullmatch(name) or ".." in name or name.endswith(".git"):
        raise HubError(f"model: expected {_FORM}, got {text!r}")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise HubError(f"{text}: expected a branch, tag or commit after @, got {revision!r}")
    place = endpoint or environ.get(ENDPOINT_VARIABLES[kind], "") or ENDPOINTS[kind]
    where = "--endpoint" if endpoint else ENDPOINT_VARIABLES[kind]
    return Source(kind, name, revision, _checked_url(place, where).rstrip("/"), _token(kind, token_file, environ))


def shown_url(url: str) -> str:
    """A URL for messages and records: without password, query and fragment, which may be secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an unreadable URL"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _checked_url(text: str, where: str) -> str:
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound or re.search(r"[\s\x00-\x1f]", text):
        raise HubError(f"{where}: expected a URL such as https://HOST, got {shown_url(text)!r}")
    return text


def _token(kind: Kind, token_file: Path | None, environ: Mapping[str, str]) -> str:
    """The token of a file or the environment, and of the library's own login for Hugging Face's hub."""
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise HubError(
                f"--token-file {token_file}: expected a file with a token, got {type(error).__name__}"
            ) from None
        return _checked_token(token, f"--token-file {token_file}")
    variable = TOKEN_VARIABLES[kind]
    if token := environ.get(variable, "").strip():
        return _checked_token(token, variable)
    if kind == "hf":
        from server.hub.huggingface import saved_token

        return _checked_token(token, "the saved login") if (token := saved_token()) else ""
    return ""


def _checked_token(token: str, where: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise HubError(f"{where}: expected a token in one word of printable characters, got something else")
    return token
