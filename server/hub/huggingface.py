"""Hugging Face's hub and its mirrors, through `huggingface_hub`: what a repository holds.

The library asks for the metadata, and knows tokens and URLs. Bytes are moved by server/hub/transfer.py, for every kind
of source alike. Xet's own protocol is not used: mirrors lack it, and the hub serves the same files over HTTP.
"""

import os
from types import ModuleType

import httpx

from server.errors import HubError
from server.hub.http import PassingError, persistently, refuse
from server.hub.listing import Listing, RemoteFile
from server.hub.source import Source


def _library() -> ModuleType:
    """`huggingface_hub`. The image's HF_HUB_OFFLINE is for serving; who runs this command asks for the network."""
    os.environ["HF_HUB_OFFLINE"] = "0"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = False
    return huggingface_hub


def saved_token() -> str:
    """The token of `hf auth login`, or "" where there is none."""
    return str(_library().get_token() or "")


def list_files(source: Source) -> Listing:
    """The files of a repository at its commit. Raises HubError."""
    library = _library()
    api = library.HfApi(endpoint=source.endpoint, token=source.token or False, library_name="voltserve")

    def once() -> object:
        try:
            return api.model_info(source.name, revision=source.revision or None, files_metadata=True, timeout=30)
        except library.errors.HfHubHTTPError as error:
            url = f"{source.endpoint}/api/models/{source.name}"
            if (response := error.response) is not None:
                refuse(response, source, url)
            raise HubError(f"{source}: {source.endpoint} refused: {type(error).__name__}") from None
        except httpx.TransportError as error:
            raise PassingError(f"{source.endpoint} does not answer ({type(error).__name__})") from None
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HubError(
                f"{source}: expected the hub's answer, got {type(error).__name__}; check --endpoint"
            ) from None

    info = persistently(str(source), once)
    commit = getattr(info, "sha", None)
    if not isinstance(commit, str) or not commit.isalnum():
        raise HubError(f"{source}: expected a commit in the hub's answer, got {str(commit)[:80]!r}; check --endpoint")
    files = tuple(_file(library, source, commit, sibling) for sibling in getattr(info, "siblings", None) or ())
    return Listing(source, commit, files)


def _file(library: ModuleType, source: Source, commit: str, sibling: object) -> RemoteFile:
    name, size = getattr(sibling, "rfilename", None), getattr(sibling, "size", None)
    lfs = getattr(sibling, "lfs", None)
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        raise HubError(
            f"{source}: {str(name)[:80]!r}: expected a size in the hub's answer, got {size!r}; check --endpoint"
        )
    return RemoteFile(
        name=name,
        size=size,
        url=library.hf_hub_url(source.name, name, revision=commit, endpoint=source.endpoint),
        sha256=str(getattr(lfs, "sha256", "") or ""),
        git_sha1="" if lfs else str(getattr(sibling, "blob_id", "") or ""),
    )
