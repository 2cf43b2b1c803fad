"""Hosts emulated by namespaces, each with a name, an address, processes and an ssh server of its own.

Nothing remains when the process that creates them ends or is killed: the namespaces have no names, and the
kernel ends each host with its parent process, and all processes of a host with the host. All hosts have the
files of this machine, as in a cluster with a shared file system, and each has one CPU.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tests.ranks.launching import processes, wait_until

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
SSH_PORT = 2222
INTERFACE = "eth0"
PATIENCE_SECONDS = 20
ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
SPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

SWITCH = "ip link add lan type bridge && ip link set lan up && echo ready && exec sleep infinity"

# $1 is the host's name, $2 the folder with its files. /etc/ssh is replaced, so that the machine's own ssh
# configuration has no effect and no host key is written to a home directory.
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
class EmulatedHost:
    """One emulated host, with the process ids that the test needs."""

    name: str
    address: str
    pid: int  # of its first process
    switch: int  # the process in whose namespace the other end of its link is
    port: str  # the name of that end
    cpu: int
    folder: Path

    def on_host(self, *command: str) -> list[str]:
        """Return a command that runs the given one on this host."""
        cpu = ("taskset", "--cpu-list", str(self.cpu))
        # Also --root, because tests may run in a chroot.
        spaces = ("--net", "--uts", "--pid", "--mount", "--root")
        entered = ("--target", str(self.pid), *spaces, f"--wd={Path.cwd()}")
        own = (f"HOME={self.folder.parent}", f"TMPDIR={self.folder}")
        return [*cpu, "nsenter", *entered, "--", "env", *own, *command]

    def received_bytes(self) -> int:
        """Return the bytes that this host has received over its link."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.partition(":")[2].split()[0])

    def running(self, text: str) -> dict[int, str]:
        """Return the command lines on this host that contain `text`, by process."""
        return {pid: line for pid, line in processes(text).items() if namespace(pid) == namespace(self.pid)}

    def unplug(self) -> None:
        run_system(*in_network_of(self.switch), "link", "set", self.port, "down")

    def plug_in(self) -> None:
        run_system(*in_network_of(self.switch), "link", "set", self.port, "up")


@dataclass(frozen=True)
class EmulatedNetwork:
    """Hosts that reach each other by name and by ssh over one switch."""

    hosts: list[EmulatedHost]
    key: Path

    def slots(self, number: int) -> str:
        """Return the first `number` hosts with one rank each, in the format of launchers."""
        return ",".join(f"{host.name}:1" for host in self.hosts[:number])

    def running(self, text: str) -> dict[int, str]:
        """Return the command lines on all hosts that contain `text`, by process."""
        return {pid: line for host in self.hosts for pid, line in host.running(text).items()}

    def restore(self) -> None:
        """Restore the links of all hosts, and end their processes."""
        for host in self.hosts:
            host.plug_in()
        for process in self.running("horovod"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def run_system(*command: str) -> None:
    """Run a system command that must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def environment() -> dict[str, str]:
    """Return an environment whose PATH includes the system's programs."""
    return os.environ | {"PATH": PATH}


@contextlib.contextmanager
def network(number: int) -> Iterator[EmulatedNetwork]:
    """Create a network of hosts for the block; remove it afterwards, also after an error."""
    # A short path, because those of the sockets below it may have 107 characters.
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
            hosts.append(EmulatedHost(name, address, children_of(outer)[0], switch, port, cpu, folder / name))
            connect(hosts[-1])
        for host in hosts:
            wait_until((host.folder / "sshd.pid").exists, PATIENCE_SECONDS, "an ssh server")
        yield EmulatedNetwork(hosts, folder / "key")


def setup(folder: Path, names: dict[str, str]) -> None:
    """Write the configuration files of the hosts."""
    run_system("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "ssh_config").write_text(SSH)
    for name in names:
        (folder / name).mkdir()
        (folder / name / "sshd_config").write_text(SSHD.format(port=SSH_PORT, folder=folder, name=name))


def connect(host: EmulatedHost) -> None:
    """Connect a host to the switch by a veth pair."""
    at_switch, at_host = in_network_of(host.switch), in_network_of(host.pid)
    peer = ("peer", "name", INTERFACE, "netns", str(host.pid))
    run_system(*at_switch, "link", "add", host.port, "type", "veth", *peer)
    run_system(*at_switch, "link", "set", host.port, "master", "lan", "up")
    run_system(*at_host, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    run_system(*at_host, "link", "set", INTERFACE, "up")


def in_network_of(process: int) -> tuple[str, ...]:
    """Return the command prefix of `ip` in the network of a process."""
    return ("nsenter", "--target", str(process), "--net", "ip")


@contextlib.contextmanager
def started(*command: str) -> Iterator[int]:
    """Start a process that ends with this one; yield its id when it is ready."""
    with subprocess.Popen(
        [*ENDS_WITH_ITS_PARENT, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        try:
            line = process.stdout.readline()
            assert line == "ready\n", line + process.stdout.read()
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


def namespace(process: int) -> str:
    """Return the namespace of a process's numbers, or nothing if it has ended."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{process}/ns/pid").readlink())
    return ""


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
