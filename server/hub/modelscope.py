"""ModelScope: what a repository holds, by the two requests that its client makes.

Its client (modelscope 1.40.2 asks the tests' hub the same) is no dependency, since it would serve these two alone. The
digests of the list pin the content, since its revisions are branches and tags.
"""

import json
from typing import Any
from urllib.parse import quote, urlencode

from server.errors import HubError
from server.hub.http import client_of, get_bytes
from server.hub.listing import Listing, RemoteFile
from server.hub.source import Source

_LIMIT = 64 << 20  # bytes of a list of files
DEFAULT_REVISION = "master"


def list_files(source: Source) -> Listing:
    """The files of a repository. Raises HubError."""
    revision = source.revision or DEFAULT_REVISION
    base = f"{source.endpoint}/api/v1/models/{quote(source.name)}/repo"
    with client_of(source) as client:
        body = get_bytes(
            client, source, f"{base}/files?{urlencode({'Revision': revision, 'Recursive': 'True'})}", _LIMIT
        )
    try:
        answer = json.loads(body)
        if answer.get("Code") != 200:
            raise HubError(f"{source}: the hub answered {str(answer.get('Message'))[:200]!r}; check name and revision")
        files = tuple(
            _file(source, base, revision, entry)
            for entry in answer["Data"]["Files"] or ()
            if entry.get("Type") != "tree"
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(
            f"{source}: expected the hub's list of files, got {type(error).__name__}; check --endpoint"
        ) from None
    return Listing(source, revision, files)


def _file(source: Source, base: str, revision: str, entry: dict[str, Any]) -> RemoteFile:
    name, size = entry["Path"], entry["Size"]
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        raise HubError(
            f"{source}: {str(name)[:80]!r}: expected a size in the hub's answer, got {size!r}; check --endpoint"
        )
    query = urlencode({"Revision": revision, "FilePath": name})
    return RemoteFile(name, size, f"{base}?{query}", sha256=str(entry.get("Sha256") or ""))
