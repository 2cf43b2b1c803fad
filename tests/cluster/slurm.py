"""A Slurm cluster of three nodes on one machine: munge, slurmctld, and one slurmd for each node.

Each node has a host name and processes of its own; powering it off kills all of its processes at once. All
daemons end with the test, also if it is killed, and other installations of Slurm and munge are not affected.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cluster.hosts import PATH, children_of, namespace
from tests.ranks import launching
from tests.ranks.fork_server import SERVER_ENVIRONMENT
from tests.ranks.forking import fork
from tests.ranks.launching import environment, processes

# Each question to Slurm starts a process, on cores that the ranks need.
wait_until = partial(launching.wait_until, pause=0.5)
CHECKOUT = Path(__file__).parents[2]
NODES = ("n1", "n2", "n3")

# A requeued job waits until the credentials of its previous start expire, by default for two minutes.
SLURM_CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=15
SlurmctldPort={port}
StateSaveLocation={folder}/state
TmpFS={folder}/tmp_%n
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""
# Two devices of each node stand in for GPUs: Slurm shows their numbers to ranks, which do not open them.
GRES_CONF = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
# Runs a module in a fork of its node's server.
PYTHON = f"""#!/bin/sh
socket=$(dirname "$ACTIVATE_FILE")/forks_$(uname -n)/socket
[ "$1" != -m ] || [ ! -S "$socket" ] || exec {" ".join(fork('"$socket"'))} "$@"
exec {sys.executable} "$@"
"""
# slurmd does not start without control groups, although these jobs use none; a chroot may lack them.
CONTROL_GROUPS = """mountpoint -q /sys/fs/cgroup || {
    mount -t tmpfs none /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd none /sys/fs/cgroup/systemd
}"""
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SIGNALING", "REQUEUED")
NODE_LINE = (
    "NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 Gres=gpu:2"
)


class Slurm:
    """Three nodes, and the commands of users and administrators."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # Hide the system's own Slurm, and a Slurm job inside which the tests may run.
        inherited = environment()
        self.environment = {
            name: text for name, text in inherited.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        self.environment["PATH"] = f"{inherited['PATH']}:{PATH}"
        self.environment["SLURM_CONF"] = f"{folder}/slurm.conf"
        self.environment |= SERVER_ENVIRONMENT | {"ACTIVATE_FILE": f"{folder}/activate"}

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle."""
        of_nodes = [f"{name}_{node}" for name in ("tmp", "forks") for node in NODES]
        for name in ("munge", "state", "bin", *of_nodes):
            (self.folder / name).mkdir()
        (self.folder / "bin/python").write_text(PYTHON)
        (self.folder / "bin/python").chmod(0o755)
        (self.folder / "activate").write_text(f"source tools/activate\nPATH={self.folder}/bin:$PATH\n")
        own, *ports = free_ports(1 + len(NODES))
        lines = "\n".join(
            NODE_LINE.format(node=node, port=port) for node, port in zip(NODES, ports, strict=True)
        )
        text = SLURM_CONF.format(folder=self.folder, port=own, nodes=lines)
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        (self.folder / "gres.conf").write_text(GRES_CONF, encoding="utf-8")
        self._start_munge()
        self._run("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.power_on(node)
        wait_until(lambda: len(list(self.folder.glob("forks_*/socket"))) == len(NODES), 60, "fork servers")

    def stop(self) -> None:
        """End all daemons and all processes on the nodes."""
        for name in reversed(list(self._daemons)):
            self.power_off(name)

    def _start_munge(self) -> None:
        place = self.folder / "munge"
        key = place / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = ("pid", "log", "seed", "key")
        flags = [f"--socket={place / 'socket'}", *(f"--{file}-file={place / file}" for file in files)]
        # --force, because munge requires stricter permissions than those of the tests' folders.
        self._run("munged", "munged", "--foreground", "--force", *flags)
        wait_until((place / "socket").exists, 20, "munge's socket")

    def power_on(self, node: str) -> None:
        """Start a node with its own host name and process namespace."""
        cores = sorted(os.sched_getaffinity(0))
        core = cores[NODES.index(node) % len(cores)]  # so that nodes do not share a core if there are enough
        # In a session of its own, because the kernel divides a core among sessions.
        server = f"setsid {sys.executable} -m tests.ranks.fork_server {self.folder}/forks_{node}/socket"
        # bash remains as the init process, which reaps others.
        boot = f"hostname {node}; {CONTROL_GROUPS}; (cd {CHECKOUT}; sleep infinity | {server}) & "
        boot += f"taskset -c {core} slurmd -D -N {node} & wait"
        command = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", boot)
        self._run(node, *command)
        wait_until(lambda: self.state_of(node) == "idle", 60, f"node {node} to be idle")

    def power_off(self, name: str) -> None:
        """Kill a node with all of its processes, or a daemon."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait(timeout=20)

    def _all_run(self) -> None:
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(
                    f"{name} ended:\n{(self.folder / f'{name}.log').read_text(errors='replace')}"
                )

    def _run(self, name: str, *command: str) -> None:
        # The kernel kills each daemon when this process ends.
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
            )

    def call(self, *command: str, seconds: int = 30) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands and wait for its end."""
        return subprocess.run(
            command,
            env=self.environment,
            cwd=CHECKOUT,
            timeout=seconds,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def submit(self, folder: Path, *arguments: str, nodes: int) -> SlurmJob:
        """Submit a job with one task per node; its output is written to `folder`."""
        output = folder / "job.txt"
        size = (f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=2")
        done = self.call("sbatch", "--parsable", *size, f"--output={output}", *arguments)
        assert done.returncode == 0, done.stdout
        return SlurmJob(self, done.stdout.strip(), output)

    def cancel_all(self) -> None:
        """Cancel all jobs, start nodes that are off, and wait until all are idle."""
        self.call("scancel", "--user=root")
        for node in NODES:
            if node not in self._daemons:
                self.power_on(node)
        wait_until(lambda: {self.state_of(node) for node in NODES} == {"idle"}, 60, "all nodes to be idle")

    def state_of(self, node: str) -> str:
        self._all_run()
        return self.call("sinfo", "-h", "-n", node, "-o", "%T").stdout.strip()

    def processes_on(self, node: str, text: str) -> list[int]:
        """Return the processes of a node whose command line contains `text`."""
        (first,) = children_of(self._daemons[node].pid)
        return [pid for pid in processes(text) if namespace(pid) == namespace(first)]


@dataclass(frozen=True)
class SlurmJob:
    """A submitted job: its output and Slurm's record of it."""

    slurm: Slurm
    number: str
    output: Path

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def record(self) -> dict[str, str]:
        fields = self.slurm.call("scontrol", "--oneliner", "show", "job", self.number).stdout.split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def report(self) -> str:
        """Return state and output, for the message of a failed test."""
        record = self.record()
        return f"{record['JobState']}, reason {record['Reason']}, exit {record['ExitCode']}\n{self.text()}"

    def wait_for_output(self, expression: str, *, times: int = 1, seconds: float = 180) -> None:
        """Wait until the output matches an expression this number of times."""

        def found() -> bool:
            if len(re.findall(expression, self.text(), re.MULTILINE)) >= times:
                return True
            state = self.record()["JobState"]
            assert state in UNDER_WAY, self.report()
            return False

        wait_until(found, seconds, f"{expression!r} in the job's output", self.report)

    def wait_for_end(self, state: str, *, seconds: float = 180) -> None:
        """Wait for the end of the job, whose state must be this."""
        wait_until(lambda: self.record()["JobState"] not in UNDER_WAY, seconds, "the job's end", self.report)
        assert self.record()["JobState"] == state, self.report()


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start a Slurm cluster for the block and stop it afterwards."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, number)
