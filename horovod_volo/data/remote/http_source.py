"""Files over HTTP and HTTPS, by the standard library. Each thread keeps its connections open.

Proxies are those of the environment (`https_proxy`, `no_proxy`).
"""

from __future__ import annotations

import re
import ssl
import threading
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from horovod_volo.core.errors import UserError
from horovod_volo.data.remote.ranges import FilePart, MissingError, TemporaryError

_TIMEOUT_SECONDS = 60.0
_REDIRECTS, _MOST_REDIRECTS = (301, 302, 303, 307, 308), 5
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_EMPTY_RANGE = re.compile(r"bytes \*/(\d+)")


class HttpSource:
    """Servers that answer range requests."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._open: set[HTTPConnection] = set()  # of all threads
        self._lock = threading.Lock()

    def read(self, url: str, start: int, length: int) -> FilePart:
        """Return up to `length` bytes from `start`; fewer only at the end of the file. Thread-safe."""
        asked = url
        for _ in range(_MOST_REDIRECTS):
            parts = urlsplit(asked)
            try:
                response = self._get(parts, start, length)
                if response.status not in _REDIRECTS:
                    return self._part(response, url, start, parts)
                response.read()
            except (OSError, HTTPException) as error:
                self._drop(parts)
                raise TemporaryError(f"{type(error).__name__} {error}".strip()) from error
            asked = urljoin(asked, response.headers.get("Location", ""))
        raise UserError(f"{url} redirects without end. Name the folder where the shards are.")

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            connection.close()

    def _part(self, response: HTTPResponse, url: str, start: int, asked: SplitResult) -> FilePart:
        """Return what an answer holds, or raise what it says; `asked` is the address after redirections."""
        status, headers = response.status, response.headers
        found = _RANGE.fullmatch(headers.get("Content-Range", ""))
        version = headers.get("ETag") or headers.get("Last-Modified") or ""
        if status == 206 and found and int(found[1]) == start:
            return FilePart(response.read(), int(found[2]), version)
        ended = _EMPTY_RANGE.fullmatch(headers.get("Content-Range", ""))
        if status == 416 and ended:
            response.read()
            return FilePart(b"", int(ended[1]), version)
        response.close()  # the rest of the answer is not wanted, so neither is the connection
        self._drop(asked)
        if status in _TEMPORARY:
            after = headers.get("Retry-After", "")
            raise TemporaryError(f"{status} {response.reason}", float(after) if after.isdecimal() else 0.0)
        if status in (404, 410):
            raise MissingError(f"the server has no {url} ({status} {response.reason}). Correct the address.")
        if status in (401, 403):
            raise UserError(f"the server refuses {url}: {status} {response.reason}. Check who may read it.")
        if status in (200, 206):
            raise UserError(
                f"the server of {url} does not answer range requests: it sends other bytes than asked "
                "for. Use one that does, such as nginx, or an object store."
            )
        raise UserError(f"{url} cannot be read: {status} {response.reason}. Check the server.")

    def _get(self, url: SplitResult, start: int, length: int) -> HTTPResponse:
        headers = {
            "Range": f"bytes={start}-{start + length - 1}",
            "Accept-Encoding": "identity",
            "User-Agent": "horovod_volo",
        }
        path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        connections = self._connections()
        is_open = self._key(url) in connections
        for again in (True, False):
            connection, through_proxy = connections.get(self._key(url)) or self._connect(url)
            connections[self._key(url)] = connection, through_proxy
            with self._lock:
                self._open.add(connection)
            target = f"http://{url.netloc}{path}" if through_proxy and url.scheme == "http" else path
            try:
                connection.request("GET", target, headers=headers)
                return connection.getresponse()
            except (OSError, HTTPException):
                self._drop(url)
                if not (again and is_open):  # the server may have closed an idle connection
                    raise
        raise AssertionError

    def _connect(self, url: SplitResult) -> tuple[HTTPConnection, bool]:
        if not url.hostname:
            raise UserError(f"{url.geturl()} names no host. Give http://HOST/FOLDER.")
        proxy = "" if proxy_bypass(url.hostname) else getproxies().get(url.scheme, "")
        server = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else url
        host, port = server.hostname or "", server.port
        if url.scheme == "https":
            secured = HTTPSConnection(
                host, port, timeout=_TIMEOUT_SECONDS, context=ssl.create_default_context()
            )
            if proxy:
                secured.set_tunnel(url.hostname, url.port)
            return secured, bool(proxy)
        return HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS), bool(proxy)

    def _connections(self) -> dict[tuple[str, str], tuple[HTTPConnection, bool]]:
        if not hasattr(self._of_thread, "connections"):
            self._of_thread.connections = {}
        found: dict[tuple[str, str], tuple[HTTPConnection, bool]] = self._of_thread.connections
        return found

    def _drop(self, url: SplitResult) -> None:
        connection, _ = self._connections().pop(self._key(url), (None, False))
        if connection is not None:
            connection.close()
            with self._lock:
                self._open.discard(connection)

    @staticmethod
    def _key(url: SplitResult) -> tuple[str, str]:
        return url.scheme, url.netloc
