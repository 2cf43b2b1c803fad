"""Stands where a launcher wants `python WORDS` and has the fork server run it; a few milliseconds' work.

    python -IS forked_rank.py SOCKET -m horovod_volo.train ...

Takes the place of the program towards its launcher: passes signals on, ends with its exit status or by
the signal that ended it. Where this process is killed, the server kills the child.
"""

import array
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str, words: list[str]) -> int:
    if signal.pthread_sigmask(signal.SIG_BLOCK, []):
        print("signals are blocked: start this program in an interpreter of its own", file=sys.stderr)
        return 1
    request = json.dumps(
        {
            "words": words,
            "environment": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109  # pathlib takes longer to import than all else here
            "umask": _umask(),
            "cpus": sorted(os.sched_getaffinity(0)),
        }
    ).encode()
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    # Signals wait until the request is out: a number within it would be taken for a part of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    streams = array.array("i", [0, 1, 2])
    first = b"%d\n" % len(request)
    server.sendmsg([first], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    answer = b""
    while more := server.recv(4096):
        answer += more
    text = answer.decode().strip()
    try:
        status = int(text)
    except ValueError:
        print(f"the fork server {text or 'is gone'}", file=sys.stderr)
        return 1
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
