"""A hub on this machine: the HTTP interfaces of Hugging Face's hub, of ModelScope and of a plain folder, with faults.

As on the real hub, large files (LFS) are redirected to another host, here another port. That host must not see the
token. Small files are answered in place, with Git's id as their ETag.
"""

from __future__ import annotations

import hashlib
import html
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_FROM = 4096  # bytes; and every safetensors file


@dataclass(frozen=True)
class Fault:
    """What happens instead of an answer to a request for a file's bytes, or for a list with the name `list`."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None  # the connection ends after so many bytes
    flip: bool = False  # one byte is another
    resize: int = 0  # the file is so many bytes longer or shorter
    ignore_range: bool = False
    wrong_range: bool = False
    page: bool = False  # a login page, with 200
    slow: float = 0.0  # seconds before each piece


@dataclass
class Repository:
    """A model: its files by name, and the commits of which the last is the newest."""

    files: dict[str, bytes]
    commit: str = "1" * 40
    token: str = ""  # asked for
    gated: bool = False  # the list is public, the files are not
    revisions: dict[str, Repository] = field(default_factory=dict)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the list says otherwise of a file

    def is_lfs(self, name: str) -> bool:
        return name.endswith(".safetensors") or len(self.files[name]) >= LFS_FROM

    @classmethod
    def of(cls, directory: Path, **more: Any) -> Repository:
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        return cls(files, **more)


class Hub:
    """The servers, what they hold, and what they have seen."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.always: dict[str, Fault] = {}
        self.requests: list[str] = []
        self.leaked: list[str] = []  # tokens that the other host has seen
        self.sent = 0  # bytes of files and lists
        self.piece = 1 << 16
        self.lock = threading.Lock()
        self.blobs: dict[str, tuple[str, bytes]] = {}
        self.front = _serve(self, _Front)
        self.back = _serve(self, _Back)
        self.url = f"http://127.0.0.1:{self.front.server_port}"
        self.cdn = f"http://127.0.0.1:{self.back.server_port}"

    def close(self) -> None:
        for server in (self.front, self.back):
            server.shutdown()
            server.server_close()

    def fault_of(self, name: str) -> Fault:
        with self.lock:
            waiting = self.faults.get(name)
            return waiting.pop(0) if waiting else self.always.get(name, Fault())

    def find(self, name: str, revision: str | None) -> Repository | None:
        repository = self.repositories.get(name)
        if repository is None or revision in (None, "main", "master", repository.commit):
            return repository
        found = repository.revisions.get(str(revision))
        return found or next((one for one in repository.revisions.values() if one.commit == revision), None)


@contextmanager
def local_hub() -> Iterator[Hub]:
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()


def _serve(hub: Hub, kind: type[_Handler]) -> ThreadingHTTPServer:
    handler = type(kind.__name__, (kind,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        # What is on its way is not much, so that `Hub.sent` is about what has arrived, however busy the machine is.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        super().setup()

    def handle(self) -> None:
        with suppress(ConnectionResetError):  # the client was killed
            super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(head=False)

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def _answer(self, *, head: bool) -> None:
        self.head = head
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        url = urlsplit(self.path)
        try:
            self.route(unquote(url.path), {key: values[0] for key, values in parse_qs(url.query).items()})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def route(self, path: str, query: dict[str, str]) -> None:
        raise NotImplementedError

    def token(self) -> str:
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return bearer or self.headers.get("Cookie", "").removeprefix("m_session_id=")

    def plain(
        self,
        status: int,
        body: bytes = b"",
        kind: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if not self.head:
            self.wfile.write(body)
            with self.hub.lock:
                self.hub.sent += len(body)

    def json(self, value: object, status: int = 200) -> None:
        self.plain(status, json.dumps(value).encode())

    def bytes_of(self, name: str, data: bytes, etag: str, **headers: str) -> None:
        """A file's bytes, whole or a range, with the fault that waits for it."""
        fault = self.hub.fault_of(name)
        if fault.status:
            self.plain(fault.status, b"{}", headers=fault.headers)
            return
        if fault.page:
            self.plain(200, b"<html>Please log in</html>", "text/html")
            return
        if fault.resize:
            data = data + b"x" * fault.resize if fault.resize > 0 else data[: fault.resize]
        if fault.flip:
            data = bytes([data[0] ^ 1]) + data[1:]
        start, status = 0, 200
        asked = self.headers.get("Range", "")
        end = len(data)
        if asked.startswith("bytes=") and not fault.ignore_range:
            first, _, last = asked[6:].partition("-")
            start, end = int(first), min(int(last) + 1 if last else end, end)
            status = 206
            if start >= len(data):
                self.plain(416, headers={"Content-Range": f"bytes */{len(data)}"})
                return
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            shown = start + 1 if fault.wrong_range else start
            self.send_header("Content-Range", f"bytes {shown}-{end - 1}/{len(data)}")
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if not self.head:
            self._send(data[start:end], fault)

    def _send(self, data: bytes, fault: Fault) -> None:
        limit = len(data) if fault.cut is None else min(fault.cut, len(data))
        for at in range(0, limit, self.hub.piece):
            piece = data[at : min(at + self.hub.piece, limit)]
            time.sleep(fault.slow)
            self.wfile.write(piece)
            with self.hub.lock:
                self.hub.sent += len(piece)
        if limit < len(data):
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)


class _Front(_Handler):
    """huggingface.co, modelscope.cn (`/api/v1/`) and a folder (`/plain/`) in one."""

    def route(self, path: str, query: dict[str, str]) -> None:
        if path.startswith("/api/v1/models/"):
            self._modelscope(path.removeprefix("/api/v1/models/"), query)
        elif path.startswith("/api/models/"):
            path = path.removeprefix("/api/models/")
            if "/tree/" in path:
                self._tree(*path.split("/tree/"))
                return
            name, _, revision = path.partition("/revision/")
            self._info(name, revision or None, blobs=query.get("blobs", "").lower() == "true")
        elif path.startswith("/plain/"):
            self._folder(*path.removeprefix("/plain/").split("/", 2))
        elif "/resolve/" in path:
            name, _, rest = path.strip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._resolve(name, revision, file)
        else:
            self.plain(404)

    def _missing(self, code: str, status: int = 404) -> None:
        self.plain(status, b'{"error": "no"}', headers={"X-Error-Code": code, "X-Error-Message": "Not found"})

    def _found(self, name: str, revision: str | None) -> Repository | None:
        """The repository, or None once the refusal is answered, as the hub does."""
        if name not in self.hub.repositories:
            self._missing("RepoNotFound", 404 if self.token() else 401)
            return None
        found = self.hub.find(name, revision)
        if found is None:
            self._missing("RevisionNotFound")
        elif found.token and not found.gated and self.token() != found.token:
            self._missing("RepoNotFound", 401)
            return None
        return found

    def _info(self, name: str, revision: str | None, *, blobs: bool) -> None:
        fault = self.hub.fault_of("list")
        if fault.status:
            self.plain(fault.status, b"{}", headers=fault.headers)
            return
        repository = self._found(name, revision)
        if repository is None:
            return
        siblings = []
        for file, data in repository.files.items():
            entry: dict[str, Any] = {"rfilename": file}
            if blobs:
                entry |= {"blobId": git_id(data), "size": len(data)}
                if repository.is_lfs(file):
                    entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 135}
                entry |= repository.claims.get(file, {})
            siblings.append(entry)
        identity = {"_id": "0" * 24, "id": name, "modelId": name, "private": False, "tags": [], "downloads": 0}
        self.json({**identity, "sha": repository.commit, "siblings": siblings})

    def _tree(self, name: str, revision: str) -> None:
        """The list that the hub's own client asks for: one page, files alone."""
        repository = self._found(name, revision)
        if repository is None:
            return
        entries = []
        for file, data in repository.files.items():
            entry: dict[str, Any] = {"type": "file", "path": file, "oid": git_id(data), "size": len(data)}
            if repository.is_lfs(file):
                entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 135}
            entries.append(entry)
        self.json(entries)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._found(name, revision)
        if repository is None:
            return
        if repository.gated and self.token() != repository.token:
            self._missing("GatedRepo", 403 if self.token() else 401)
            return
        if file not in repository.files:
            self._missing("EntryNotFound")
            return
        data = repository.files[file]
        commit = {"X-Repo-Commit": repository.commit}
        if not repository.is_lfs(file):
            self.bytes_of(file, data, git_id(data), **commit)
            return
        digest = sha256(data)
        self.hub.blobs[digest] = (file, data)
        self.plain(
            302,
            b"Found",
            "text/plain",
            {
                "Location": f"{self.hub.cdn}/{digest}?X-Amz-Signature=secret-signature",
                "X-Linked-Size": str(len(data)),
                "X-Linked-Etag": f'"{digest}"',
                **commit,
            },
        )

    def _modelscope(self, path: str, query: dict[str, str]) -> None:
        name, _, what = path.partition("/repo")
        name = name.partition("/revisions")[0]
        repository = self.hub.find(name, query.get("Revision"))
        if repository is None or (repository.token and self.token() != repository.token):
            status = 403 if repository else 404
            self.json({"Code": status, "Message": "record not found", "Success": False}, status)
        elif path.endswith("/revisions"):
            branch = {"Revision": "master", "CreatedAt": 1}
            self.json({"Code": 200, "Data": {"RevisionMap": {"Branches": [branch], "Tags": []}}, "Success": True})
        elif what == "/files":
            files = [
                {
                    **{
                        "Name": Path(file).name,
                        "Path": file,
                        "Type": "blob",
                        "Size": len(data),
                        "Sha256": sha256(data),
                    },
                    **{"Revision": repository.commit, "CommittedDate": 1, "IsLFS": repository.is_lfs(file)},
                }
                for file, data in repository.files.items()
            ]
            self.json({"Code": 200, "Data": {"Files": files}, "Message": "success", "Success": True})
        elif query.get("FilePath") in repository.files:
            data = repository.files[query["FilePath"]]
            self.bytes_of(query["FilePath"], data, sha256(data))
        else:
            self.json({"Code": 404, "Message": "no such file", "Success": False}, 404)

    def _folder(self, owner: str, name: str, file: str = "") -> None:
        repository = self.hub.repositories.get(f"{owner}/{name}")
        if repository is None or (file and file not in repository.files):
            self.plain(404)
        elif file:
            data = repository.files[file]
            self.bytes_of(file, data, sha256(data)[:16])
        else:
            links = "".join(f'<a href="{quote(one)}">{html.escape(one)}</a>\n' for one in repository.files)
            self.plain(200, f'<html><a href="../">../</a>\n{links}</html>'.encode(), "text/html")


class _Back(_Handler):
    """The host of large files."""

    def route(self, path: str, query: dict[str, str]) -> None:
        if token := self.token():
            self.hub.leaked.append(token)
        found = self.hub.blobs.get(path.strip("/"))
        if found is None or "X-Amz-Signature" not in query:
            self.plain(403)
        else:
            self.bytes_of(found[0], found[1], sha256(found[1]))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
