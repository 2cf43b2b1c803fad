"""Starts counting ranks as horovodrun would: passes on what they exchange and, if elastic, gives out ranks.

    python -m tests.faults.counting_launcher FOLDER HOST,HOST... elastic|fixed ARGUMENTS...

One thread, so that ranks can be forked from it. Commands come on the standard input, one a line: `hosts A,B`
changes the hosts, `cut A SECONDS` keeps the connections of a host waiting.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.counting_rank import become_rank, note

COOL_DOWN_SECONDS, LOST_SECONDS, PATIENCE_SECONDS = 0.2, 0.8, 3.0
REMOVED = b"-1,-1,-1,-1,-1,-1"


class RankConnection:
    """The connection to a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.received, self.unsent = connection, b"", b""
        self.rank, self.count = -1, 0  # of messages

    def messages(self) -> list[Any]:
        """Receive; return the messages that are complete, None for the end."""
        found = []
        self.received += (received := self.socket.recv(1 << 16))
        while len(self.received) >= 4 and len(self.received) >= 4 + (
            size := int.from_bytes(self.received[:4])
        ):
            found.append(pickle.loads(self.received[4 : 4 + size]))
            self.received = self.received[4 + size :]
        return found if received else [None]


class CountingLauncher:
    """The ranks of a run, one on each host, of which 1, 2 or 4 train."""

    def __init__(self, folder: Path, hosts: list[str], elastic: bool, arguments: list[str]) -> None:
        self.folder, self.hosts, self.elastic, self.arguments = folder, hosts, elastic, arguments
        self.processes: dict[str, int] = {}  # that have not ended, and are not given up, by host
        self.members: list[str] = []  # hosts, by rank
        self.asked: dict[str, socket.socket] = {}  # hosts that wait for a rank
        self.there: dict[str, bytes] = {}  # what processes tell each other
        self.ranks: dict[int, RankConnection] = {}
        self.rounds: dict[int, dict[int, Any]] = {}  # what ranks have sent, by the number of the message
        self.cut: dict[str, float] = {}  # until when hosts are cut off
        self.silent: dict[str, float] = {}  # since when processes of hosts do not answer
        self.failed: dict[str, float] = {}  # when processes of hosts failed
        self.first_asked = self.told = self.ended = 0.0
        self.status = 0
        for ended in (*folder.glob("cut.*"), *folder.glob("slow")):  # faults of an earlier launcher
            ended.unlink()
        self.selector = selectors.DefaultSelector()
        self.listeners = hub, http = (
            *(socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(2)),
        )
        self.selector.register(hub, selectors.EVENT_READ, self._accept_rank)
        self.selector.register(http, selectors.EVENT_READ, self._answer)
        self.selector.register(0, selectors.EVENT_READ, self._command)
        ports = {"HUB": hub, "HOROVOD_GLOO_RENDEZVOUS_PORT": http}
        os.environ.update({name: str(each.getsockname()[1]) for name, each in ports.items()})
        os.environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_ELASTIC=str(int(elastic)))

    def run(self) -> int:
        """Return when no process is left that was not given up."""
        self._form([])
        while self.processes:
            for key, _ in self.selector.select(0.02):
                key.data(key.fileobj)
            now = time.monotonic()
            self._reap(now)
            self._find_lost(now)
            if self.elastic:
                self._form_again(now)
            elif self.ended and now > self.ended + PATIENCE_SECONDS:
                for process in self.processes.values():
                    os.kill(process, signal.SIGKILL)
        return self.status

    def _command(self, stdin: int) -> None:
        lines = os.read(stdin, 4096).decode()
        if not lines:
            self.selector.unregister(stdin)
        for word, names, *seconds in map(str.split, lines.splitlines()):
            if word == "hosts":
                self.hosts = names.split(",")
            else:
                self.cut[names] = time.monotonic() + float(seconds[0])
                (self.folder / f"cut.{names}").touch()

    def _find_lost(self, now: float) -> None:
        """Dissolve ranks of which one is stopped or cut off; if elastic, give it up, although it lives on."""
        for host, until in list(self.cut.items()):
            if now > until:
                del self.cut[host]
                (self.folder / f"cut.{host}").unlink()
        for host, process in list(self.processes.items()):
            if host not in self.cut and not is_stopped(process):
                self.silent.pop(host, None)
            elif now > self.silent.setdefault(host, now) + LOST_SECONDS:
                if self.elastic:
                    self._give_up(host)
                else:
                    self._dissolve()
        for rank, connection in list(self.ranks.items()):
            if self.members[rank] not in self.cut and connection.unsent:
                self._send(rank, b"")

    def _give_up(self, host: str) -> None:
        del self.processes[host]
        self.failed[host] = time.monotonic()
        if host in self.asked:
            self.asked.pop(host).close()
        if host in self.members:
            self._dissolve()

    def _reap(self, now: float) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                process, status = ended[0], os.waitstatus_to_exitcode(ended[1])
                note(self.folder, "exit", of=process, status=status)
                if host := next((host for host, each in self.processes.items() if each == process), ""):
                    self.status, self.ended = self.status or (status if status >= 0 else 1), self.ended or now
                    self._give_up(host)

    def _dissolve(self) -> None:
        """Close the connections of the ranks that are connected."""
        for connection in self.ranks.values():
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(connection.socket)
            connection.socket.close()
        self.ranks, self.rounds = {}, {}

    def _accept_rank(self, hub: socket.socket) -> None:
        connection = RankConnection(hub.accept()[0])
        connection.socket.settimeout(1.0)
        self.selector.register(connection.socket, selectors.EVENT_READ, partial(self._receive, connection))

    def _receive(self, connection: RankConnection, source: socket.socket) -> None:
        if connection.rank >= 0 and self.members[connection.rank] in self.cut:
            return
        try:
            messages = connection.messages()
        except OSError:
            messages = [None]
        for message in messages:
            if connection.rank < 0 and message:  # the first one
                rank, size, host, process = message
                if self.members[rank:][:1] == [host] and (len(self.members), self.processes.get(host)) == (
                    size,
                    process,
                ):
                    connection.rank, self.ranks[rank] = rank, connection
                    continue
                message = None
            if message is None:
                if self.ranks.get(connection.rank) is connection:
                    self._dissolve()
                elif source.fileno() >= 0:
                    self.selector.unregister(source)
                    source.close()
                return
            connection.count += 1
            self.rounds.setdefault(connection.count, {})[connection.rank] = message[0]
            if len(self.rounds[connection.count]) == len(self.members):
                values = self.rounds.pop(connection.count)
                payload = pickle.dumps([values[rank] for rank in range(len(values))])
                for rank in list(self.ranks):
                    self._send(rank, len(payload).to_bytes(4) + payload)

    def _send(self, rank: int, content: bytes) -> None:
        connection = self.ranks.get(rank)
        if connection is not None:
            connection.unsent += content
            if self.members[rank] not in self.cut:
                with contextlib.suppress(OSError):
                    connection.socket.sendall(connection.unsent)
                connection.unsent = b""

    def _answer(self, http: socket.socket) -> None:
        """Answer a request to the driver: a value of /there, or, later, a rank."""
        connection, _ = http.accept()
        connection.settimeout(1.0)
        with contextlib.suppress(OSError, ValueError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(4096) or b"\r\n\r\n"
            head, _, body = request.partition(b"\r\n\r\n")
            method, path, *_ = head.decode().split()
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                0,
            )
            while len(body) < length:
                body += connection.recv(4096)
            if path.startswith("/rank_and_size/"):
                host = path.split("/")[2].split(":")[0]
                if host not in self.processes:
                    return respond(connection, REMOVED)
                self.first_asked = self.first_asked if self.asked else time.monotonic()
                self.asked[host] = connection
                return None
            if method == "PUT":
                self.there[path] = body
            respond(connection, self.there.get(path))
        return None

    def _form_again(self, now: float) -> None:
        ready = [host for host in self.hosts if host not in self.processes and self._answers(host, now)]
        if not self.asked:
            left = set(self.members) & set(self.processes) - set(self.hosts)
            more = largest(len([host for host in self.members if host in self.processes]) + len(ready))
            if (
                (left or more > len(self.members))
                and now > self.told + 0.3
                and self.members[0] in self.processes
            ):
                self.told = now
                os.kill(self.processes[self.members[0]], signal.SIGUSR2)
            return
        for host in self.processes.keys() - self.asked.keys():
            if now < self.first_asked + PATIENCE_SECONDS:
                return
            self._give_up(host)
        self._form(ready)

    def _answers(self, host: str, now: float) -> bool:
        return host not in self.cut and now > self.failed.get(host, 0.0) + COOL_DOWN_SECONDS

    def _form(self, ready: list[str]) -> None:
        """Give out ranks to the processes that have asked, those of before first, and start others."""
        self._dissolve()
        asked, self.asked = self.asked, {}
        candidates = [host for host in self.members if host in asked and host in self.hosts]
        candidates += ready or (self.hosts if not self.members else [])
        self.members, self.there, self.status, self.ended = candidates[: largest(len(candidates))], {}, 0, 0.0
        for host, connection in asked.items():
            if host not in self.members:
                del self.processes[host]
                respond(connection, REMOVED)
        for rank, host in enumerate(self.members):
            numbers = [rank, len(self.members), 0, 1, rank, len(self.members)]
            if host in asked:
                respond(asked[host], ",".join(map(str, numbers)).encode())
            else:
                self._start(host, numbers)

    def _start(self, host: str, numbers: list[int]) -> None:
        process = os.fork()
        if process:
            self.processes[host] = process
            note(self.folder, "forked", of=process)
            return
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        os.environ.update({f"HOROVOD_{name}": str(each) for name, each in zip(names, numbers, strict=True)})
        os.environ["HOROVOD_HOSTNAME"] = host
        become_rank(self.folder, self.arguments)


def largest(ranks: int) -> int:
    """Return the largest power of two of at most 4 and so many ranks; sums of others would be rounded."""
    return max((size for size in (1, 2, 4) if size <= ranks), default=0)


def is_stopped(process: int) -> bool:
    """Return whether a child is stopped by a signal."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] == "T"


def respond(connection: socket.socket, value: bytes | None) -> None:
    status, body = ("200 OK", value) if value is not None else ("404 Not Found", b"")
    with contextlib.suppress(OSError):
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    connection.close()


if __name__ == "__main__":
    target, names, kind, *given = sys.argv[1:]
    os._exit(CountingLauncher(Path(target), names.split(","), kind == "elastic", given).run())
