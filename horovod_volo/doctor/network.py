"""Checks the network of a host: its interfaces, and what horovodrun with gloo shows to other users.

Values of environment variables are never part of a finding, because reports are passed on.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from horovod_volo.cluster.topology import read_text_or_empty
from horovod_volo.doctor.report import Finding, failure, ok, warning

_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_SECRET_NAME = re.compile(
    r"(TOKENS?|SECRETS?|PASSW(OR)?DS?|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|(?<![a-z]))KEYS?)(_|$)",
    re.I,
)
_NAME_OF_PLACE = re.compile(r"_(FILE|PATH|DIR|SOCK|URL)$", re.I)
# horovodrun sets this one with all others in the command line of each rank, quoted for one shell or two.
_OF_RANK = b" HOROVOD_RANK="
_SET_VARIABLE = re.compile(rb"""[\s'"]([A-Za-z_]\w*)=['"]*[^'"\s]""")
_OTHER_LOOPBACK = "127.0.0.2"  # of this host too, but only a server of all interfaces listens there


class Interface(NamedTuple):
    """One network interface of this host."""

    name: str
    address: str  # IPv4; empty: none
    megabits: int  # per second; 0: unknown
    up: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gb/s" if self.megabits else "speed unknown"
        return f"{self.name} {self.address or 'without address'} ({speed if self.up else 'down'})"


def list_interfaces() -> list[Interface]:
    """Return this host's interfaces, without the loopback."""
    interfaces = []
    for name in sorted({name for _, name in socket.if_nameindex()} - {"lo"}):
        folder = Path("/sys/class/net", name)
        speed = read_text_or_empty(folder / "speed")  # -1 or unreadable where the interface does not know
        is_up = bool(int(read_text_or_empty(folder / "flags") or "0", 16) & _IFF_UP)
        interfaces.append(Interface(name, _address(name), int(speed) if speed.isdecimal() else 0, is_up))
    return interfaces


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def check_interfaces() -> Iterator[Finding]:
    """List this host's network interfaces, and check that gloo's exists."""
    usable = [one for one in list_interfaces() if one.up or one.address]
    host, names = socket.gethostname(), [one.name for one in usable]
    yield ok(f"{host}: {', '.join(map(str, usable)) or 'only the loopback'}")
    gloo_interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if gloo_interface not in ("", "lo", *names):
        text = f"HOROVOD_GLOO_IFACE is {gloo_interface}, which is missing or down on {host}"
        yield failure(text, f"Name one that is up: {', '.join(names) or 'lo'}.")


def check_command_lines() -> Iterator[Finding]:
    """Warn of secrets that horovodrun wrote into the command lines of this process and its ancestors."""
    names, pid = set(), os.getpid()
    while pid > 1:
        try:
            names |= secret_names(Path(f"/proc/{pid}/cmdline").read_bytes())
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:  # of another user, where /proc hides processes
            break
        pid = int(stat.rpartition(b")")[2].split()[1])  # the name before it may contain anything
    if names:
        yield warning(
            "horovodrun writes all variables into the command lines of ranks, where every user of the host "
            f"can read them with `ps`; these look like secrets: {', '.join(sorted(names))}",
            "Start with jobs/horovodrun.sh, which passes only what ranks need, or with mpirun; or unset them "
            "before horovodrun. Replace secrets that other users may have read.",
        )


def secret_names(command_line: bytes) -> set[str]:
    """Return the names of variables that horovodrun sets on a command line and that look like secrets."""
    arguments = [argument for argument in command_line.split(b"\0") if _OF_RANK in argument]
    names = {name.decode() for argument in arguments for name in _SET_VARIABLE.findall(argument)}
    return {name for name in names if _SECRET_NAME.search(name) and not _NAME_OF_PLACE.search(name)}


def check_rendezvous(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Warn if the rendezvous server of horovodrun is on this host and listens on all interfaces."""
    address, port = (environment.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
    if not address or not port.isdecimal():
        return
    try:
        socket.create_connection((_OTHER_LOOPBACK, int(port)), timeout=1).close()
    except OSError:
        return
    yield warning(
        f"horovodrun's server at {address}:{port} listens on all interfaces, without authentication; it, "
        "and ranks that connect through gloo, unpickle what they are sent: who reaches them can run code",
        "Use a trusted network only: set NETWORK_INTERFACE in jobs/env.sh, or HOROVOD_GLOO_IFACE, to a "
        "private interface, and close the hosts' ports to other networks; or start with mpirun.",
    )
