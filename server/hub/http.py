"""Requests to hubs: one client, refusals as messages, and patience with servers that fail for a while."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx

from server.errors import HubError
from server.hub.source import TOKEN_VARIABLES, Source, shown_url

T = TypeVar("T")

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try without progress
LONGEST_WAIT = 120.0  # of what a server's Retry-After asks for
TIMEOUT = httpx.Timeout(30.0, connect=15.0)
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_RESET = re.compile(r"\bt=(\d+)")  # seconds, in the RateLimit header


class PassingError(Exception):
    """A failure that another try may not have. `after`: the seconds that the server asks to wait."""

    def __init__(self, problem: str, after: float | None = None) -> None:
        super().__init__(problem)
        self.after = after


class Patience:
    """Counts tries without progress, and waits between them."""

    def __init__(self, what: str, stop: threading.Event | None = None) -> None:
        self._what = what
        self._stop = stop or threading.Event()
        self._tries = 0

    def progress(self) -> None:
        """Something arrived: begins counting anew."""
        self._tries = 0

    def wait(self, error: PassingError) -> None:
        """Waits before the next try. Raises HubError after the last."""
        if self._tries == len(WAITS):
            raise HubError(f"{self._what}: {error}, {self._tries + 1} times; try again later, or another --endpoint")
        asked = 0.0 if error.after is None else min(error.after, LONGEST_WAIT)
        self._stop.wait(max(WAITS[self._tries], asked))
        self._tries += 1


def client_of(source: Source) -> httpx.Client:
    """A client with the source's token, which redirects to other hosts do not get (httpx drops it there)."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "voltserve"}
    if source.token:
        headers["Authorization"] = f"Bearer {source.token}"
        if source.kind == "modelscope":
            headers["Cookie"] = f"m_session_id={source.token}"
    return httpx.Client(headers=headers, follow_redirects=True, timeout=TIMEOUT, max_redirects=10)


@contextmanager
def asked(
    client: httpx.Client, source: Source, url: str, headers: dict[str, str] | None = None
) -> Iterator[httpx.Response]:
    """One GET whose body is still to be read: status 200, 206 or 416.

    Raises HubError for a refusal, and PassingError for what another try may not meet.
    """
    try:
        with client.stream("GET", url, headers=headers) as response:
            refuse(response, source, url)
            yield response
    except httpx.TransportError as error:
        raise PassingError(f"the connection to {_host(url)} failed ({_reason(error)})") from None
    except (httpx.StreamError, httpx.TooManyRedirects, httpx.InvalidURL, httpx.DecodingError) as error:
        raise HubError(f"{source}: {_host(url)} answered in a way that cannot be followed: {_reason(error)}") from None


def refuse(response: httpx.Response, source: Source, url: str) -> None:
    """Raises what a status that is no success means."""
    status = response.status_code
    if status in (200, 206, 416):
        return
    if status in RETRIED:
        raise PassingError(f"{_host(url)} answered {status}", _retry_after(response))
    raise HubError(f"{source}: {_host(url)} answered {status} for {shown_url(url)}; {_remedy(status, source)}")


def _remedy(status: int, source: Source) -> str:
    variable = TOKEN_VARIABLES[source.kind]
    give = f"set {variable} or --token-file" if variable else "give --token-file, or user and password in the URL"
    if status == 401:
        return f"check owner and name; where the model is private or gated: {give}, with a token that is valid"
    if status == 403:
        page = f" at {shown_url(source.endpoint)}/{source.name}" if source.endpoint else ""
        return f"access is not granted: accept the model's terms{page}, then {give}"
    if status == 404:
        return "check owner, name and revision; a private model also looks like this without a token"
    return "expected a success; check the endpoint"


def persistently(what: str, once: Callable[[], T], stop: threading.Event | None = None) -> T:
    """The result of `once`, tried again after failures that pass. Raises HubError."""
    patience = Patience(what, stop)
    while True:
        try:
            return once()
        except PassingError as error:
            patience.wait(error)


def get_bytes(client: httpx.Client, source: Source, url: str, limit: int) -> bytes:
    """The body of a small document. Raises HubError where it is larger than `limit`."""

    def once() -> bytes:
        with asked(client, source, url) as response:
            return read_at_most(response, limit, f"{source}: {shown_url(url)}")

    return persistently(f"{source}: {shown_url(url)}", once)


def read_at_most(response: httpx.Response, limit: int, what: str) -> bytes:
    """The body. Raises HubError where it is larger than `limit`; no more than that is kept."""
    body = bytearray()
    for chunk in response.iter_raw(1 << 16):
        body += chunk
        if len(body) > limit:
            raise HubError(f"{what}: expected at most {limit} bytes, got more")
    return bytes(body)


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal() and len(value) < 8:
        return float(value)
    match = _RESET.search(response.headers.get("ratelimit", ""))
    return float(match[1]) if match and len(match[1]) < 8 else None


def _host(url: str) -> str:
    return shown_url(url).partition("://")[2].partition("/")[0]


def _reason(error: Exception) -> str:
    """An error's kind and first line; httpx's messages hold no header."""
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text and "?" not in text[0] else type(error).__name__
