"""Folders on a server, read by obstore (HTTP, HTTPS, S3, Google Cloud Storage, Azure), and a cache of blocks.

The cache is a folder on a local disk, up to a limit; several processes of a host may share it. It is no
library's: fsspec's caches have no limit, and diskcache never deletes the files of killed processes.

Invariants: all bytes of a file are of one version. The first answer names the version and the size of the
whole file; a later one with others is an error, not data. A cached block appears by rename and ends with its
checksum, so that one which a killed process or a power failure left incomplete is read again. A block that is
evicted stays readable for who has it open.
"""

import base64
import fcntl
import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog_file import OpenFile, open_file

SCHEMES = ("http://", "https://", "s3://", "gs://", "az://")
# Each pause is random, from the first to `base` times the previous one: about half a minute in all.
BACKOFF = {"init_backoff": timedelta(seconds=0.25), "max_backoff": timedelta(seconds=4), "base": 3}
RETRIES = 15
BLOCK_BYTES = 2**22  # of the cache
_CHECKSUM_BYTES = 4
_CLIENT = {"allow_http": True, "read_timeout": "60s", "timeout": "1h"}
_REMEDIES = {  # by what the class or the text of an error contains
    "FileNotFound": "Correct the address",
    "PermissionDenied": "Check the credentials, and who may read it",
    "Unauthenticated": "Write `machine HOST login USER password PASSWORD` into ~/.netrc on every host, and "
    "let nobody else read it: chmod 600",
    "get_credentials|ProfileNotFound": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, on "
    "every host; for a public bucket AWS_SKIP_SIGNATURE=true",
    "NotSupported": "Use a server that answers range requests, such as nginx, or an object store",
    "416 Range|Wanted range": "It was changed: upload the shards with the list that belongs to them",
    "407 Proxy|ProxyAuthRequired": "Give the proxy's user and password in https_proxy or http_proxy, as "
    "http://USER:PASSWORD@HOST:PORT",
    "TunnelUnsuccessful": "Check the proxy, or name the host in no_proxy",
    "InvalidCertificate": "Set SSL_CERT_FILE to a file with the certificate of the server's authority",
    "retries|HTTP error": "Restart with --resume auto when the server answers",
    "": "Check the server and its settings",
}


class MissingError(UserError):
    """A file that the server does not have or, as stores do that may not be listed, refuses."""


class RemoteFolder:
    """A folder on a server. Threads may share it."""

    def __init__(self, url: str, sizes: dict[str, int] | None = None) -> None:
        """`sizes` are what files must have, by their names."""
        self.url, self._sizes = url, sizes or {}
        self._first_answers: dict[str, tuple[int, str]] = {}  # sizes and versions by name
        try:
            from botocore.exceptions import BotoCoreError
            from obstore.exceptions import BaseError

            self._errors = (OSError, ValueError, BaseError, BotoCoreError)
            self._store = _open_store(url)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{url} needs {error.name}: pip install 'horovod_volo[remote]' on every host."
            ) from None
        except self._errors as error:
            raise _with_remedy(url, error) from error

    def url_of(self, name: str) -> str:
        """Return the address of a file. Keys in object stores are not quoted."""
        return f"{self.url}/{quote(name) if self.url.startswith('http') else name}"

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Return `length` bytes of a file from `offset`; fewer only at its end."""
        try:
            answer = self._store.get(name, options={"range": (offset, offset + length)})
            data = memoryview(answer.bytes())
        except self._errors as error:
            raise _with_remedy(self.url_of(name), error) from error
        size, version = answer.meta["size"], answer.meta["e_tag"] or str(answer.meta["last_modified"])
        first = self._first_answers.setdefault(name, (size, version))
        listed = self._sizes.get(name, size)
        if first != (size, version) or listed != size:
            raise UserError(
                f"{self.url_of(name)} was changed: it has {size:,} bytes and version {version}, but its list "
                f"says {listed:,} bytes and the first answer said version {first[1]}. Upload the shards with "
                "the list that belongs to them, and restart with --resume auto."
            )
        return data

    def size_and_version(self, name: str) -> tuple[int, str]:
        """Return what the first answer said of a file; ask the server if there was none yet."""
        if name not in self._first_answers:
            self.read(name, 0, 1)
        return self._first_answers[name]


def _open_store(url: str) -> Any:
    from obstore import store

    options: dict[str, Any] = {"retry_config": {"max_retries": RETRIES, "backoff": BACKOFF}}
    if url.startswith("http"):
        options["client_options"] = _CLIENT | {"default_headers": _login(urlsplit(url).hostname or "")}
        return store.HTTPStore.from_url(url, **options)
    if url.startswith("s3://") and os.environ.get("AWS_SKIP_SIGNATURE", "false") == "false":
        from obstore.auth.boto3 import Boto3CredentialProvider  # also reads ~/.aws, which obstore does not

        options["credential_provider"] = Boto3CredentialProvider()
    return store.from_url(quote(url, safe=":/"), client_options=_CLIENT, **options)


def _login(host: str) -> dict[str, str]:
    """Return the header with a host's password in ~/.netrc, or in the file that NETRC names."""
    with suppress(NetrcParseError, OSError, UnicodeError):  # matters only where the server wants a password
        found = netrc(os.environ.get("NETRC")).hosts.get(host)  # not `default`, which is for any server
        if found is not None:
            login = base64.b64encode(f"{found[0]}:{found[2]}".encode()).decode()
            return {"Authorization": f"Basic {login}"}
    return {}


def _with_remedy(url: str, error: Exception) -> UserError:
    text, _, details = str(error).partition("\n\nDebug source:")
    reason = text.partition(" - ")[2] or text
    if "sending request" in reason:  # the cause, such as a refused connection, is among the details only
        reason = ", ".join([reason, *re.findall(r'"([^"]+)"', details)[1:]])
    found = f"{type(error).__name__} {error}"
    reason = " ".join(re.sub("<[^>]+>", " ", reason).split())[:200].strip(" :.")  # without the tags of a page
    remedy = next(remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, found))
    kind = MissingError if re.match("FileNotFound|PermissionDenied", found) else UserError
    return kind(f"{url} cannot be read: {reason}. {remedy}.")


class BlockCache:
    """A folder with blocks of files. Threads may share it."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._blocks = folder, folder / "blocks"
        self._limit = max(limit_bytes, 2 * BLOCK_BYTES)
        self._verified: set[Path] = set()

    def read(self, remote: RemoteFolder, name: str, offset: int, length: int) -> bytes:
        """Return bytes of a file; whole blocks are read and kept. A fault of the folder is a UserError."""
        size, version = remote.size_and_version(name)
        identity = f"{remote.url_of(name)} {size} {version}"
        folder = self._blocks / hashlib.sha256(identity.encode()).hexdigest()[:32]
        parts, end = [], min(offset + length, size)
        try:
            for first in range(offset - offset % BLOCK_BYTES, end, BLOCK_BYTES):
                path, begin = folder / str(first // BLOCK_BYTES), max(0, offset - first)
                block = self._kept(path)
                if block is None:
                    # One thread of all processes reads a block from the server; the others wait for it.
                    with self._locked(f"locks/{zlib.crc32(str(path).encode()) % 256}"):
                        block = self._kept(path) or self._keep(path, remote.read(name, first, BLOCK_BYTES))
                parts.append(block.read(begin, min(BLOCK_BYTES, end - first) - begin))
        except OSError as error:
            raise UserError(
                f"the cache in {self._folder} cannot be used: {error.strerror}. Name a folder on a local "
                "disk with --cache-dir, or lower --cache-gib."
            ) from error
        return b"".join(parts)

    def _kept(self, path: Path) -> OpenFile | None:
        """Open a block; None if it is not in the folder, or damaged."""
        try:
            block = open_file(path)
        except FileNotFoundError:
            self._verified.discard(path)
            return None
        if path not in self._verified:
            content = block.read(0, BLOCK_BYTES + _CHECKSUM_BYTES)
            if _checksum(content[:-_CHECKSUM_BYTES]) != content[-_CHECKSUM_BYTES:]:
                return None
            self._verified.add(path)
        with suppress(OSError):
            os.utime(block.descriptor)  # the blocks that were not used for longest are evicted
        return block

    def _keep(self, path: Path, content: memoryview) -> OpenFile:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.partial")  # its lock is held
        with self._locked("usage.lock"):
            self._make_room(len(content) + _CHECKSUM_BYTES)  # before it is written: the limit always holds
            with unfinished.open("wb") as file:
                file.writelines((content, _checksum(content)))
            unfinished.replace(path)
            self._verified.add(path)
            return open_file(path)

    def _make_room(self, added: int) -> None:
        """Count a new block, and evict others if it would exceed the limit.

        A killed process leaves a number that is too large; the blocks are counted again when it is the limit.
        """
        usage, used = self._folder / "usage", self._limit
        with suppress(FileNotFoundError, ValueError):
            used = int(usage.read_text())
        if used + added > self._limit:
            blocks = [(path.stat(), path) for path in self._blocks.glob("*/*")]
            used = sum(status.st_size for status, _ in blocks)
            for status, path in sorted(blocks, key=lambda block: block[0].st_mtime_ns):
                if used + added <= 0.9 * self._limit:
                    break
                path.unlink()
                used -= status.st_size
        usage.write_text(str(used + added))

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a file in the folder, against other threads and other processes of this host."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _checksum(block: bytes | memoryview) -> bytes:
    return zlib.crc32(block).to_bytes(_CHECKSUM_BYTES, "little")
