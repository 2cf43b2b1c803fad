"""Hosts made of namespaces: each has a name, an address, processes and an ssh server of its own.

Nothing of them outlives the process that makes them, even where it is killed: no namespace has a name that
could stay behind, and the kernel ends each host with its parent, and all that runs in a host with the host.
They share the files of the machine, as the hosts of a cluster do; each has one CPU.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tests.cluster.conftest import PATH

SSH_PORT = 2222
INTERFACE = "eth0"
PATIENCE_SECONDS = 20
ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
SPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

SWITCH = "ip link add lan type bridge && ip link set lan up && echo ready && exec sleep infinity"

# $1 the host's name, $2 the folder of what hosts need. /etc/ssh becomes empty: the machine's own ways with
# ssh are no part of a test, and no host's key is written into anybody's home.
HOST = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /etc/ssh
cp "$2/ssh_config" /etc/ssh/
mount --bind "$2/hosts" /etc/hosts
echo "$1" >/proc/sys/kernel/hostname
ip link set lo up
echo ready
exec "$(command -v sshd)" -D -f "$2/$1/sshd_config"
"""

SSHD = """
Port {port}
ListenAddress 0.0.0.0
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}/sshd.pid
SetEnv TMPDIR={folder}/{name}
StrictModes no
UsePAM no
ClientAliveInterval 1
ClientAliveCountMax 3
"""

SSH = """
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""


@dataclass(frozen=True)
class Host:
    """One emulated host, with the process ids that the test needs."""

    name: str
    address: str
    pid: int  # of its first process
    switch: int  # the process that holds the other end of its cable
    port: str  # the name of that end
    cpu: int
    folder: Path

    def here(self, *words: str) -> list[str]:
        """Return the command prefix that runs a command on this host."""
        cpu = ("taskset", "--cpu-list", str(self.cpu))
        spaces = ("--net", "--uts", "--pid", "--mount", "--root")  # the root too: tests may run in a chroot
        entered = ("--target", str(self.pid), *spaces, f"--wd={Path.cwd()}")
        own = (f"HOME={self.folder.parent}", f"TMPDIR={self.folder}")
        return [*cpu, "nsenter", *entered, "--", "env", *own, *words]

    def received_bytes(self) -> int:
        """Return the bytes that this host has received over its link."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.partition(":")[2].split()[0])

    def running(self, text: str) -> dict[int, str]:
        """Return the commands that run on this host and have `text` in them, by process."""
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                if text in command and (process / "ns" / "pid").readlink() == own:
                    found[int(process.name)] = command
        return found

    def unplug(self) -> None:
        """Take this host's link down."""
        command("nsenter", "--target", str(self.switch), "--net", "ip", "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """Bring this host's link up again."""
        command("nsenter", "--target", str(self.switch), "--net", "ip", "link", "set", self.port, "up")


@dataclass(frozen=True)
class Network:
    """Hosts that reach each other, by name and by ssh, over one switch."""

    hosts: list[Host]
    key: Path

    def slots(self, number: int) -> str:
        """Return the first `number` hosts in the format of launchers, with one rank each."""
        return ",".join(f"{host.name}:1" for host in self.hosts[:number])

    def running(self, text: str) -> list[str]:
        """Return the commands that run on any host and have `text` in them."""
        return [command for host in self.hosts for command in host.running(text).values()]


def command(*words: str) -> None:
    """Run a command of the system that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"


def environment() -> dict[str, str]:
    """Return an environment in which the system's programs are found."""
    return os.environ | {"PATH": PATH}


@contextlib.contextmanager
def network(number: int) -> Iterator[Network]:
    """Create a network of hosts, and remove it at the end even after an error."""
    # A short path: sockets lie below it, and theirs may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="hosts_"))
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        token = secrets.token_hex(2)
        names = {f"node{n}-{token}": f"10.77.0.{n}" for n in range(1, number + 1)}
        setup(folder, names)
        switch = undo.enter_context(started("unshare", "--net", "sh", "-c", SWITCH))
        hosts = []
        for (name, address), cpu in zip(names.items(), cycle(sorted(os.sched_getaffinity(0))), strict=False):
            first = ("taskset", "--cpu-list", str(cpu), "unshare", *SPACES, "sh", "-c", HOST, "sh")
            outer = undo.enter_context(started(*first, name, str(folder)))
            port = f"to_{name.partition('-')[0]}"
            hosts.append(Host(name, address, child_of(outer), switch, port, cpu, folder / name))
            connect(hosts[-1])
        for host in hosts:
            wait_for(host.folder / "sshd.pid")
        yield Network(hosts, folder / "key")


def setup(folder: Path, names: dict[str, str]) -> None:
    """Write the files that the hosts' system needs."""
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "ssh_config").write_text(SSH)
    for name in names:
        (folder / name).mkdir()
        (folder / name / "sshd_config").write_text(SSHD.format(port=SSH_PORT, folder=folder, name=name))


def connect(host: Host) -> None:
    """Connect a host to the switch by a veth pair."""
    at_switch = ("nsenter", "--target", str(host.switch), "--net", "ip")
    at_host = ("nsenter", "--target", str(host.pid), "--net", "ip")
    peer = ("peer", "name", INTERFACE, "netns", str(host.pid))
    command(*at_switch, "link", "add", host.port, "type", "veth", *peer)
    command(*at_switch, "link", "set", host.port, "master", "lan", "up")
    command(*at_host, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    command(*at_host, "link", "set", INTERFACE, "up")


@contextlib.contextmanager
def started(*words: str) -> Iterator[int]:
    """Start a process that ends with this one; return its id once it has reported that it is ready."""
    with subprocess.Popen(
        [*ENDS_WITH_ITS_PARENT, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == "ready\n", said + process.stdout.read()
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


def child_of(pid: int) -> int:
    """Return the only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def wait_for(file: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.02)
