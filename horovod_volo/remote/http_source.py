"""Files over HTTP and HTTPS, by the standard library. Each thread keeps its connections open.

Proxies, with their passwords, are those of the environment (`https_proxy`, `no_proxy`). Passwords of servers
are in ~/.netrc, or in the file that NETRC names: an address is printed and recorded.
"""

from __future__ import annotations

import base64
import os
import re
import string
import threading
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from netrc import NetrcParseError, netrc
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from horovod_volo.core.errors import UserError
from horovod_volo.remote.ranges import FilePart, MissingError, RefusedError, TemporaryError

_TIMEOUT_SECONDS = 60.0
_REDIRECTS, _MOST_REDIRECTS = (301, 302, 303, 307, 308), 5
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")
_PROXY_REFUSES = re.compile(r"Tunnel connection failed: ((\d+).*)")  # a message of http.client
_REMEDIES = {
    401: "Give a user and a password in ~/.netrc on every host",
    407: "Give the proxy's user and password in https_proxy or http_proxy, as http://USER:PASSWORD@HOST:PORT",
}


class _Connection(NamedTuple):
    """An open connection, and what its requests need."""

    http: HTTPConnection
    origin: str  # before the path, for a proxy
    headers: dict[str, str]  # with passwords


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
                if (refusal := _PROXY_REFUSES.fullmatch(str(error))) and int(refusal[2]) not in _TEMPORARY:
                    remedy = _REMEDIES.get(int(refusal[2]), "Check the proxy, or name the host in no_proxy")
                    raise UserError(f"the proxy refuses {parts.hostname}: {refusal[1]}. {remedy}.") from None
                raise TemporaryError(f"{type(error).__name__} {error}".strip()) from error
            location = response.headers.get("Location", "")
            asked = urljoin(asked, quote(location, string.punctuation, "latin-1"))  # its bytes, as text
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
        if status == 206 and found and found[1] and int(found[1]) == start:
            return FilePart(response.read(), int(found[2]), version)
        if status == 416 and found and not found[1]:
            response.read()
            return FilePart(b"", int(found[2]), version)
        response.close()  # the rest of the answer is not wanted, so neither is the connection
        self._drop(asked)
        if status in _TEMPORARY:
            after = headers.get("Retry-After", "")
            raise TemporaryError(f"{status} {response.reason}", float(after) if after.isdecimal() else 0.0)
        if status in (404, 410):
            raise MissingError(f"the server has no {url} ({status} {response.reason}). Correct the address.")
        if status == 403:
            raise RefusedError(f"the server refuses {url}: 403 {response.reason}. Check who may read it.")
        if status in (200, 206):
            raise UserError(
                f"the server of {url} does not answer range requests: it sends other bytes than asked "
                "for. Use one that does, such as nginx, or an object store."
            )
        remedy = (status == 401 and _read_netrc()[1]) or _REMEDIES.get(status, "Check the server")
        raise UserError(f"{url} cannot be read: {status} {response.reason}. {remedy}.")

    def _get(self, url: SplitResult, start: int, length: int) -> HTTPResponse:
        headers = {
            "Range": f"bytes={start}-{start + length - 1}",
            "Accept-Encoding": "identity",
            "User-Agent": "horovod_volo",
        }
        path = quote(f"{url.path or '/'}?{url.query}" if url.query else url.path or "/", string.punctuation)
        connections, server = self._connections(), url[:2]
        for again in (server in connections, False):  # the server may have closed an idle connection
            connection = connections.get(server) or self._connect(url)
            connections[server] = connection
            with self._lock:
                self._open.add(connection.http)
            try:
                connection.http.request("GET", connection.origin + path, headers=headers | connection.headers)
                return connection.http.getresponse()
            except (OSError, HTTPException):
                self._drop(url)
                if not again:
                    raise
        raise AssertionError

    def _connect(self, url: SplitResult) -> _Connection:
        if not url.hostname:
            raise UserError(f"{url.geturl()} names no host. Give http://HOST/FOLDER.")
        proxy = "" if proxy_bypass(url.hostname) else getproxies().get(url.scheme, "")
        server = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else url
        try:
            host, port = server.hostname or "", server.port
        except ValueError:  # its message may hold a part of a password
            raise UserError(
                f"the port of the {'proxy' if proxy else 'server'} is no number. Write / in passwords as %2F."
            ) from None
        found = _read_netrc()[0].get(url.hostname)  # not `default`, which a redirect would send elsewhere
        headers = _login("Authorization", found[0], found[2]) if found else {}
        of_proxy: dict[str, str] = {}
        if proxy and server.username is not None:
            of_proxy = _login("Proxy-Authorization", unquote(server.username), unquote(server.password or ""))
        if url.scheme == "https":
            secured = HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS)
            if proxy:
                secured.set_tunnel(url.hostname, url.port, of_proxy)
            return _Connection(secured, "", headers)
        origin = f"http://{url.netloc}" if proxy else ""
        return _Connection(HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS), origin, headers | of_proxy)

    def _connections(self) -> dict[tuple[str, str], _Connection]:
        """Return the connections of this thread, by scheme and host."""
        found: dict[tuple[str, str], _Connection] = self._of_thread.__dict__.setdefault("connections", {})
        return found

    def _drop(self, url: SplitResult) -> None:
        connection = self._connections().pop(url[:2], None)
        if connection is not None:
            connection.http.close()
            with self._lock:
                self._open.discard(connection.http)


def _read_netrc() -> tuple[dict[str, tuple[str, str, str]], str]:
    """Return users, accounts and passwords by host, and the remedy if the file cannot be used."""
    file = os.environ.get("NETRC")
    try:
        return netrc(file).hosts, ""
    except (NetrcParseError, OSError, UnicodeError) as error:  # its message may hold a password
        remedy = f"{file or '~/.netrc'} cannot be used. Correct it, and let nobody else read it: chmod 600"
        return {}, "" if isinstance(error, FileNotFoundError) else remedy


def _login(header: str, user: str, password: str) -> dict[str, str]:
    return {header: f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
