"""Runs a Python program in a fork of the fork server, as a launcher would run `python ARGUMENTS`.

    python -IS forked_rank.py SOCKET -m horovod_volo.train ...

Towards its launcher this process behaves like the program: it forwards signals, and ends with the program's
exit status or by the signal that ended it. If this process is killed, the server kills the child.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str, arguments: list[str]) -> int:
    # Signals are blocked until the request is sent, so that their numbers do not end up inside it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    umask = os.umask(0)
    os.umask(umask)
    request = {"arguments": arguments, "environment": dict(os.environ), "umask": umask}
    request["folder"] = os.getcwd()  # noqa: PTH109  # pathlib takes longer to import than all else here
    request["cpus"], request["blocked"] = sorted(os.sched_getaffinity(0)), sorted(blocked)
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    socket.send_fds(server, [b"s"], [0, 1, 2])
    server.sendall(json.dumps(request).encode() + b"\n")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    response = b""
    with suppress(ConnectionResetError):  # it ended before it read a signal; what it sent has arrived
        while more := server.recv(4096):
            response += more
    try:
        status = int(response)
    except ValueError:
        print(f"the fork server {response.decode().strip() or 'is gone'}", file=sys.stderr)
        return 1
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
