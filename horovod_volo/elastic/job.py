"""The place of this process in an elastic job of horovodrun.

Whenever hosts are lost or added, each process asks horovodrun's driver for its new rank; the answer comes
when every process of the job has asked, or has ended. Horovod would ask in `hvd.init()`, and abort the
process if its host has left the job or another process does not come. So this process asks by itself, and
waits until all are there. Horovod's question then goes to a small server in this process, which has the
answer and passes all other requests on to the driver.
"""

import http.client
import os
import socket
import threading
import time
import uuid
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from horovod_volo.cluster.collectives import listen_for_hosts
from horovod_volo.cluster.pinning import autotunes
from horovod_volo.core.errors import UserError

_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
# In the order of the driver's answer.
_RANKS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_QUESTION = "/rank_and_size/"
_POLL_SECONDS = 0.05
# Of all ranks together while they wait for each other; the driver's server answers 1,000 to 2,400.
_REQUESTS_PER_SECOND = 400
_CONNECT_SECONDS = 30.0
# What a server with too many connections does with others before it reads a request, and how often that
# request is sent again: after pauses that double, 26 s in all.
_RETRIES = 9
_OVERRUN = (ConnectionRefusedError, ConnectionResetError, BrokenPipeError)
# The driver waits for hosts for HOROVOD_ELASTIC_TIMEOUT. It waits for ever for a process that neither asks
# nor ends: one that it does not start again, because its host came back while there were less than --min-np.
_ANSWER_SECONDS = 60.0 + float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", 600))
# Seconds within which a connection whose other end is gone is given up: idle, between probes, number of them.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class RemovedError(Exception):
    """This process is no longer in the job: its host was removed, or the others have gone on without it."""


class DriverLostError(UserError):
    """horovodrun does not answer."""


class ElasticJob:
    """Gives this process its rank, again whenever the ranks are formed again. One per process."""

    def __init__(self) -> None:
        """Listen for changes of hosts; raise UserError unless horovodrun has started an elastic job."""
        if os.environ.get("HOROVOD_ELASTIC") != "1":
            raise UserError(
                "--elastic needs an elastic launcher: horovodrun --gloo -np N --min-np N "
                "--host-discovery-script SCRIPT, or jobs/horovodrun.sh with MIN_RANKS."
            )
        name = "HOROVOD_AUTOTUNE" if autotunes() else "HOROVOD_CYCLE_TIME"
        if autotunes() or name in os.environ:
            raise UserError(
                f"Horovod crashes when it forms ranks again with {name} set. Unset it, or drop --elastic."
            )
        self.hosts_changed = False  # whether the driver has other hosts than the ranks were formed with
        self.start_seconds = float(os.environ.get("HOROVOD_START_TIMEOUT", 60))
        # The same on all processes of the job, and of no other that runs.
        self.name = f"{os.environ[_ADDRESS]}:{os.environ[_PORT]}"
        self._driver = (os.environ[_ADDRESS], int(os.environ[_PORT]))
        self._slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
        self.answer = b""  # of the driver, to the question for the rank
        self._own_id = uuid.uuid4().hex.encode()
        self._is_first = True
        listen_for_hosts(self)
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_FromHorovod, self))
        threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
        os.environ[_ADDRESS], os.environ[_PORT] = "127.0.0.1", str(server.server_address[1])

    def on_hosts_updated(self, timestamp: int, change: object) -> None:  # noqa: ARG002
        """Note that hosts have been added or removed. Horovod calls this, on rank 0 alone."""
        self.hosts_changed = True

    def join(self) -> None:
        """Wait for this process's rank, and until the processes of all are there.

        Raise RemovedError if this host has left the job, and DriverLostError if horovodrun does not answer.
        """
        # The launcher gave the first rank in the environment.
        has_rank, self._is_first = self._is_first, False
        while not (has_rank and self._all_there()):
            self._ask_for_rank()
            has_rank = True

    def has_this(self) -> bool:
        """Return whether the driver has not given out new ranks without this process."""
        # It then forgets this value, or another process has set it.
        return self._value(f"/there/{self._slot}") == self._own_id

    def pass_on(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a request to the driver; return status and body. Raise DriverLostError without an answer."""
        retries = 0
        while True:
            try:
                return self._request(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                if type(error) not in _OVERRUN or retries == _RETRIES:
                    raise DriverLostError(f"horovodrun at {self.name} does not answer: {error}") from error
            time.sleep(_POLL_SECONDS * 2**retries)
            retries += 1

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._driver, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_SECONDS)  # the answer comes when all processes have asked
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _ask_for_rank(self) -> None:
        _wait_for_turn()
        if not self.has_this():
            raise RemovedError
        self.hosts_changed = False
        _, self.answer = self.pass_on("GET", f"{_QUESTION}{self._slot}")
        numbers = self.answer.decode().split(",")
        if int(numbers[0]) < 0:
            raise RemovedError
        os.environ.update({f"HOROVOD_{name}": number for name, number in zip(_RANKS, numbers, strict=True)})

    def _all_there(self) -> bool:
        """Wait until the processes of all ranks have called this; rank 0 decides whether they have."""
        rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
        _wait_for_turn()
        for place in (self._slot, rank):
            self.pass_on("PUT", f"/there/{place}", self._own_id)
        limit = time.monotonic() + self.start_seconds
        if rank == 0:
            present = 1
            while present < size and time.monotonic() < limit:
                if self._value(f"/there/{present}") is None:
                    time.sleep(_POLL_SECONDS)
                else:
                    present += 1
            self.pass_on("PUT", "/there/all", b"1" if present == size else b"")
            return present == size
        while (decision := self._value("/there/all")) is None:
            if time.monotonic() > limit + _CONNECT_SECONDS:
                return False
            time.sleep(max(_POLL_SECONDS, size / _REQUESTS_PER_SECOND))
        return bool(decision)

    def _value(self, path: str) -> bytes | None:
        status, value = self.pass_on("GET", path)
        return value if status == http.client.OK else None


def _wait_for_turn() -> None:
    """Wait so that the ranks send a request one after the other."""
    time.sleep(int(os.environ["HOROVOD_RANK"]) / _REQUESTS_PER_SECOND)


class _FromHorovod(BaseHTTPRequestHandler):
    """What Horovod takes for the driver: answers its question for the rank, and passes on other requests."""

    def __init__(self, job: ElasticJob, *connection: Any) -> None:
        self._job = job
        super().__init__(*connection)

    def do_GET(self) -> None:
        try:
            if self.command == "GET" and self.path.startswith(_QUESTION):
                status, answer = int(http.client.OK), self._job.answer
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = self._job.pass_on(self.command, self.path, body or None)
        except DriverLostError:
            status, answer = http.client.BAD_GATEWAY, b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
