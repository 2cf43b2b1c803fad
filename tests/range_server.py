"""An HTTP server of a folder that answers range requests, and fails as a test says. Written for the tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class FolderServer(ThreadingHTTPServer):
    """The server; what it is asked for is noted, and `failures` are the answers to the next requests."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), RangeRequest)
        self.folder = folder
        self.requests: list[tuple[str, int, int]] = []  # path, first byte, number of bytes
        self.authorizations: list[str] = []  # the header of each request for a file
        self.connections = 0
        self.failures: list[Any] = []  # a status, "cut" or "close", each for one request for a shard
        self.answers_ranges, self.version = True, "1"
        self.absent = 404  # the status for a file that is not there; stores that may not be listed: 403
        self.login = ("", "")  # the header with a password that requests must have, and its value

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bytes_of(self, ending: str) -> int:
        return sum(length for path, _, length in self.requests if path.endswith(ending))

    def get_request(self) -> Any:
        self.connections += 1
        return super().get_request()


class RangeRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FolderServer

    def do_GET(self) -> None:
        server = self.server
        header, value = server.login
        if header and self.headers.get(header) != value:
            self._answer(407 if header.startswith("Proxy") else 401, b"", {})
            return
        path = unquote(urlsplit(self.path).path)
        file = server.folder / path.lstrip("/")
        if not file.is_file():
            self._answer(server.absent, b"nothing here", {})
            return
        content = file.read_bytes()
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        if not part:
            self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        server.requests.append((self.path, first, len(part)))
        server.authorizations.append(self.headers.get("Authorization", ""))
        failure = server.failures.pop(0) if server.failures and file.suffix == ".tar" else None
        if isinstance(failure, int):
            self._answer(failure, b"", {})
        elif failure == "close":
            self.close_connection = True
        elif not server.answers_ranges:
            self._answer(200, content, {})
        else:
            last = first + len(part) - 1
            headers = {
                "ETag": server.version,
                "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                "Content-Range": f"bytes {first}-{last}/{len(content)}",
            }
            self._answer(206, part, headers, sent=len(part) // 2 if failure == "cut" else None)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(folder: Path) -> Iterator[FolderServer]:
    server = FolderServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
