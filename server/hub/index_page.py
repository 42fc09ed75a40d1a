"""A plain directory on a web server, as its index page lists it; digests are those of its SHA256SUMS, if it has one."""

import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from quant.errors import QuantError
from quant.verify.manifest import FILE_NAME, parse_manifest
from server.errors import HubError
from server.hub.http import PassingError, client_of, get_bytes, persistently, refuse
from server.hub.listing import Listing, RemoteFile
from server.hub.source import Source, shown_url

_PAGE_LIMIT = 8 << 20
_MOST_FILES = 10_000
_AT_ONCE = 8
_DECIMAL = re.compile(r"[0-9]{1,18}")


class _Links(HTMLParser):
    """Collects where a page's links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """HTMLParser's interface."""
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def list_files(source: Source) -> Listing:
    """The files that the page at the source's URL links to, beside it. Raises HubError."""
    with client_of(source) as client:
        page = get_bytes(client, source, source.name, _PAGE_LIMIT).decode("utf-8", "replace")
        urls = _files_beside(source.name, page)
        if not urls:
            raise HubError(f"{source}: expected an index page with links to files, got none; name the model's folder")
        if len(urls) > _MOST_FILES:
            raise HubError(f"{source}: expected at most {_MOST_FILES} files, got {len(urls)}")
        digests = _digests(client, source, urls)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            files = pool.map(lambda name: _file(client, source, name, urls[name], digests.get(name, "")), sorted(urls))
            return Listing(source, "", tuple(files))


def _files_beside(base: str, page: str) -> dict[str, str]:
    """File names and URLs of the links that lead to a file in the page's own folder."""
    links = _Links()
    links.feed(page)
    folder = urlsplit(base)
    urls: dict[str, str] = {}
    for link in links.found:
        try:
            url = urlsplit(urljoin(base, link))
        except ValueError:
            continue
        path = url.path.removeprefix(folder.path)
        name = unquote(path)
        beside = (url.scheme, url.netloc) == (folder.scheme, folder.netloc) and url.path.startswith(folder.path)
        if beside and name and "/" not in name and not url.query:
            urls[name] = urljoin(base, path)
    return urls


def _digests(client: httpx.Client, source: Source, urls: dict[str, str]) -> dict[str, str]:
    if FILE_NAME not in urls:
        return {}
    text = get_bytes(client, source, urls[FILE_NAME], _PAGE_LIMIT).decode("utf-8", "replace")
    try:
        return parse_manifest(text, f"{source}{FILE_NAME}")
    except QuantError as error:
        raise HubError(f"{error.problem}; a list of digests that cannot be read cannot be trusted") from None


def _file(client: httpx.Client, source: Source, name: str, url: str, sha256: str) -> RemoteFile:
    def once() -> RemoteFile:
        try:
            response = client.head(url)
        except httpx.TransportError as error:
            raise PassingError(f"the connection failed ({type(error).__name__})") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise HubError(f"{shown_url(url)}: {type(error).__name__}") from None
        refuse(response, source, url)
        length = response.headers.get("content-length", "")
        if not _DECIMAL.fullmatch(length):
            raise HubError(f"{shown_url(url)}: expected its size (Content-Length), got {length or 'none'!r}")
        return RemoteFile(name, int(length), url, sha256=sha256, etag=response.headers.get("etag", ""))

    return persistently(shown_url(url), once)
