"""A Hugging Face Hub on 127.0.0.1 with one repository: what huggingface_hub asks for in a download, and no more."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "c0ffee" + 34 * "0"


@dataclass
class Hub:
    """A running server. fetched: names of the files whose bytes were sent; ranges: their Range headers."""

    endpoint: str
    files: dict[str, bytes]
    fetched: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    break_off: str = ""  # a file whose connection ends before its last bytes, once


class _Server(ThreadingHTTPServer):
    def __init__(self, repository: str, files: dict[str, bytes], revisions: tuple[str, ...]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.revisions = repository, revisions
        self.hub = Hub(endpoint=f"http://127.0.0.1:{self.server_address[1]}", files=files)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, name: str) -> None:
        hub = self.server.hub
        whole = hub.files[name]
        etag = hashlib.sha256(whole).hexdigest()
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if self.command == "HEAD":
            self._send(200, b"", Content_Length=str(len(whole)), **headers)
            return
        wanted, start = self.headers.get("Range"), 0
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content_Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        hub.fetched.append(name)
        hub.ranges += [wanted] if wanted else []
        if hub.break_off == name:
            hub.break_off = ""
            self._send(200, whole[:-1000], Content_Length=str(len(whole)), **headers)
            self.close_connection = True
            return
        self._send(206 if wanted else 200, whole[start:], **headers)

    def do_GET(self) -> None:
        hub, repository = self.server.hub, self.server.repository
        path = unquote(urlparse(self.path).path).strip("/")
        if path in {f"api/models/{repository}/revision/{name}" for name in self.server.revisions}:
            siblings = [{"rfilename": name} for name in hub.files]
            self._send(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"api/models/{repository}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self._send(200, json.dumps(entries).encode())
        elif (name := path.removeprefix(f"{repository}/resolve/{COMMIT}/")) in hub.files:
            self._file(name)
        else:
            code = "RevisionNotFound" if path.startswith(f"api/models/{repository}/") else "RepoNotFound"
            self._send(404, b"{}", X_Error_Code=code)

    do_HEAD = do_GET


@contextmanager
def hub_of(repository: str, files: dict[str, bytes], revisions: tuple[str, ...] = ("main",)) -> Iterator[Hub]:
    """Serve ``files`` of ``repository`` while the block runs."""
    server = _Server(repository, files, (*revisions, COMMIT))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
