"""Checks what a start with horovodrun and gloo shows to other users of the hosts and of the network.

Values of environment variables are never part of a finding, because reports are passed on.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from horovod_volo.doctor.finding import Finding, run_check, warning

_SECRET_NAME = re.compile(
    r"(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|"
    r"(API|ACCESS|PRIVATE|(?<![a-z]))KEYS?)(_|$)",
    re.I,
)
_NAME_OF_PLACE = re.compile(r"_(FILE|PATH|DIR|SOCK|URL)$", re.I)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_OF_RANK = b" HOROVOD_RANK="  # horovodrun sets it in the command line of each rank
_LISTENS = "0A"


def check_exposure(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), pid: int | None = None
) -> list[Finding]:
    """Check the command line and the rendezvous server of horovodrun; without gloo there is nothing."""
    address, port = (environment.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
    if "HOROVOD_RANK" not in environment or not (address and port.isdecimal()):
        return []
    return [
        *run_check("environment", lambda: _readable_secrets(root, pid or os.getpid())),
        *run_check("rendezvous", lambda: _open_rendezvous(root, address, int(port))),
    ]


def _readable_secrets(root: Path, pid: int) -> Iterator[Finding]:
    names = sorted({name for line in _command_lines(root, pid) for name in secret_names(line)})
    if names:
        yield warning(
            "environment",
            "horovodrun writes all variables into the command lines of ranks, where every user of the host "
            f"can read them with `ps`; these look like secrets: {', '.join(names)}",
            "Start with jobs/horovodrun.sh, which passes only what ranks need, or with mpirun; or unset them "
            "before horovodrun. Replace secrets that other users may have read.",
        )


def _command_lines(root: Path, pid: int) -> Iterator[bytes]:
    """Yield the command lines of a process and its ancestors."""
    while pid > 1:
        try:
            yield (root / f"proc/{pid}/cmdline").read_bytes()
            stat = (root / f"proc/{pid}/stat").read_bytes()
        except OSError:  # of another user, where /proc hides processes
            return
        pid = int(stat.rpartition(b")")[2].split()[1])  # the name before it may contain anything


def secret_names(command_line: bytes) -> set[str]:
    """Return the names of variables that horovodrun sets on a command line and that look like secrets."""
    found = set()
    for argument in command_line.split(b"\0"):
        if _OF_RANK not in argument:
            continue
        try:
            words = shlex.split(os.fsdecode(argument))
        except ValueError:  # the command that follows the variables is not of a shell's form
            continue
        for match in map(_ASSIGNMENT.fullmatch, words):
            if match and match[2] and _SECRET_NAME.search(match[1]) and not _NAME_OF_PLACE.search(match[1]):
                found.add(match[1])
    return found


def _open_rendezvous(root: Path, address: str, port: int) -> Iterator[Finding]:
    if _is_of_this_host(address) and listens_everywhere(root, port):
        yield warning(
            "rendezvous",
            f"horovodrun's server at {address}:{port} listens on all interfaces, without authentication; it, "
            "and ranks that connect through gloo, unpickle what they are sent: who reaches them can run code",
            "Use a trusted network only: set NETWORK_INTERFACE in jobs/env.sh, or HOROVOD_GLOO_IFACE, to a "
            "private interface, and close the hosts' ports to other networks; or start with mpirun.",
        )


def _is_of_this_host(address: str) -> bool:
    try:
        with socket.create_server((address, 0)):
            return True
    except OSError:
        return False


def listens_everywhere(root: Path, port: int) -> bool:
    """Return whether a socket of this host listens on a TCP port of all interfaces."""
    for file in ("proc/net/tcp", "proc/net/tcp6"):
        if not (root / file).exists():  # a kernel without IPv6
            continue
        for line in (root / file).read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            host, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port and int(host, 16) == 0:
                return True
    return False
