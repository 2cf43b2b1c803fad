"""Starts counting ranks as horovodrun would: passes on what they exchange and, if elastic, gives out ranks.

    python -m tests.faults.counting_launcher FOLDER HOST,HOST... ARGUMENTS...

One thread, so that ranks can be forked from it. Commands come on the standard input, one a line: `hosts A,B`
changes the hosts, `cut A SECONDS` keeps the connections of a host waiting.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.faults.counting_rank import become_rank, note, process_state

COOL_DOWN_SECONDS, LOST_SECONDS, PATIENCE_SECONDS = 0.2, 0.8, 3.0
REMOVED = b"-1,-1,-1,-1,-1,-1"


class DriverRequest(BaseHTTPRequestHandler):
    """A request to the driver: to read or write what processes tell each other, or for a rank."""

    timeout = 1.0

    def do_GET(self) -> None:
        launcher: CountingLauncher = self.server.launcher
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/rank_and_size/"):
            launcher.ask(self.path.split("/")[2].split(":")[0], self.connection.dup())
            return
        if self.command == "PUT":
            launcher.there[self.path] = body
        respond(self.connection, launcher.there.get(self.path))

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


class CountingLauncher:
    """The ranks of a run, one on each host, of which 1, 2 or 4 train."""

    def __init__(self, folder: Path, hosts: list[str], arguments: list[str]) -> None:
        self.folder, self.hosts, self.arguments = folder, hosts, arguments
        self.elastic = "--elastic" in arguments
        self.processes: dict[str, int] = {}  # that have not ended, and are not given up, by host
        self.members: list[str] = []  # hosts, by rank
        self.asked: dict[str, socket.socket] = {}  # hosts that wait for a rank
        self.there: dict[str, bytes] = {}  # what processes tell each other
        self.ranks: dict[int, Connection] = {}
        self.counts: dict[int, int] = {}  # of messages, by rank
        self.rounds: dict[int, dict[int, bytes]] = {}  # what ranks have sent, by the number of the message
        self.unsent: dict[int, list[bytes]] = {}  # what ranks have not received yet
        self.cut: dict[str, float] = {}  # until when hosts are cut off
        self.silent: dict[str, float] = {}  # since when processes of hosts do not answer
        self.failed: dict[str, float] = {}  # when processes of hosts failed
        self.first_asked = self.told = self.ended = 0.0
        self.status, self.commands = 0, [0]
        (folder / "slow").unlink(missing_ok=True)  # a fault of an earlier launcher
        self.hub = Listener(("127.0.0.1", 0), backlog=64)
        self.http = HTTPServer(("127.0.0.1", 0), DriverRequest)
        self.http.launcher = self
        self.http.shutdown_request = self.http.close_request  # an answer may come later
        ports = {"HUB": self.hub.address[1], "HOROVOD_GLOO_RENDEZVOUS_PORT": self.http.server_port}
        os.environ.update({name: str(port) for name, port in ports.items()})
        os.environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_ELASTIC=str(int(self.elastic)))

    def run(self) -> int:
        """Return when no process is left that was not given up."""
        self._form([])
        while self.processes:
            self._communicate()
            now = time.monotonic()
            self._reap(now)
            self._find_lost(now)
            if self.elastic:
                self._form_again(now)
            elif self.ended and now > self.ended + PATIENCE_SECONDS:
                for process in self.processes.values():
                    os.kill(process, signal.SIGKILL)
        return self.status

    def _communicate(self) -> None:
        """Wait a moment for commands, requests, new ranks, and messages of ranks that are not cut off."""
        heard = [each for rank, each in self.ranks.items() if self.members[rank] not in self.cut]
        listeners = {self.hub._listener._socket: self._accept, self.http.socket: self.http.handle_request}
        for ready in wait([*heard, *listeners, *self.commands], 0.02):
            if ready in listeners:
                listeners[ready]()
            elif ready in self.commands:
                self._obey(os.read(0, 4096).decode())
            elif ready in self.ranks.values():  # they have not been dissolved meanwhile
                self._receive(next(rank for rank, each in self.ranks.items() if each is ready))

    def _obey(self, commands: str) -> None:
        self.commands = self.commands if commands else []
        for word, names, *seconds in map(str.split, commands.splitlines()):
            if word == "hosts":
                self.hosts = names.split(",")
            else:
                self.cut[names] = time.monotonic() + float(seconds[0])
                (self.folder / f"cut.{names}").write_text(str(self.cut[names]))

    def _accept(self) -> None:
        connection = self.hub.accept()
        with contextlib.suppress(OSError, EOFError):
            rank, size, host, process = pickle.loads(connection.recv_bytes())
            is_member = self.members[rank:][:1] == [host] and size == len(self.members)
            if is_member and self.processes.get(host) == process:
                self.ranks[rank], self.unsent[rank], self.counts[rank] = connection, [], 0
                return
        connection.close()

    def _receive(self, rank: int) -> None:
        try:
            message = self.ranks[rank].recv_bytes()
        except (OSError, EOFError):
            self._dissolve()
            return
        self.counts[rank] += 1
        values = self.rounds.setdefault(self.counts[rank], {})
        values[rank] = message
        if len(values) == len(self.members):
            reply = pickle.dumps([values[each] for each in sorted(values)])
            for messages in self.unsent.values():
                messages.append(reply)
            self._send()

    def _send(self) -> None:
        """Send what ranks have not received that are not cut off."""
        for rank, messages in self.unsent.items():
            while messages and self.members[rank] not in self.cut:
                with contextlib.suppress(OSError):
                    self.ranks[rank].send_bytes(messages[0])
                del messages[0]

    def ask(self, host: str, connection: socket.socket) -> None:
        """Note that the process of a host waits for a rank."""
        if host not in self.processes:
            respond(connection, REMOVED)
            return
        self.first_asked = self.first_asked if self.asked else time.monotonic()
        self.asked[host] = connection

    def _find_lost(self, now: float) -> None:
        """Dissolve ranks of which one is stopped or cut off; if elastic, give it up, although it lives on."""
        for host, until in list(self.cut.items()):
            if now > until:
                del self.cut[host]
        for host, process in list(self.processes.items()):
            if host not in self.cut and process_state(process) != "T":
                self.silent.pop(host, None)
            elif now > self.silent.setdefault(host, now) + LOST_SECONDS:
                if self.elastic:
                    self._give_up(host)
                else:
                    self._dissolve()
        self._send()

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
        """Close the connections of all ranks."""
        for connection in self.ranks.values():
            connection.close()
        self.ranks, self.rounds, self.unsent = {}, {}, {}

    def _form_again(self, now: float) -> None:
        ready = [host for host in self.hosts if host not in self.processes and self._answers(host, now)]
        if not self.asked:
            left = set(self.members) & set(self.processes) - set(self.hosts)
            more = largest(len([host for host in self.members if host in self.processes]) + len(ready))
            if (left or more > len(self.members)) and now > self.told + 0.3:
                self.told = now
                for process in [self.processes[host] for host in self.members[:1] if host in self.processes]:
                    os.kill(process, signal.SIGUSR2)
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
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the child may be told of hosts before it listens
        process = os.fork()
        if process:
            self.processes[host] = process
            note(self.folder, "forked", of=process)
            return
        for inherited in (self.hub, self.http.socket, *self.asked.values()):
            inherited.close()
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        os.environ.update({f"HOROVOD_{name}": str(each) for name, each in zip(names, numbers, strict=True)})
        os.environ["HOROVOD_HOSTNAME"] = host
        become_rank(self.folder, self.arguments)


def largest(ranks: int) -> int:
    """Return the largest power of two of at most 4 and so many ranks; sums of others would be rounded."""
    return max((size for size in (1, 2, 4) if size <= ranks), default=0)


def respond(connection: socket.socket, value: bytes | None) -> None:
    status, body = ("200 OK", value) if value is not None else ("404 Not Found", b"")
    with contextlib.suppress(OSError):
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    connection.close()


if __name__ == "__main__":
    target, names, *given = sys.argv[1:]
    os._exit(CountingLauncher(Path(target), names.split(","), given).run())
