"""Ends a run that hangs: starts a process beside each rank that watches its heartbeat.

If no step, or stage of the set-up, ends within the limit, each watchdog writes its rank's stacks into the run
folder, and kills the rank. One of them names the ranks that the others waited for. If the set of ranks may
change, only those ranks are killed, and the others go on without them.
"""

import faulthandler
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.cluster.heartbeat import CONNECTING, DUMP, Heartbeat
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import escape_controls, print_error

_FIRST_STEP_SECONDS = 1800.0  # before the first log point: it may compile
_LEAST_SECONDS, _STEPS = 600.0, 50
# Without site-packages, whose start-up files may import much.
_PROGRAM = """
import json, sys
sys.path.append(sys.argv[1])
from horovod_volo.cluster.watchdog_process import main
main(**json.loads(sys.argv[2]))
"""
_PACKAGES = str(Path(__file__).parents[2])
# Slurm may send them to all processes of a job; the watchdog ends with its rank.
_NOT_FOR_IT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, DUMP}


def learned_limit(seconds_per_step: float) -> float:
    """Return the seconds without the end of a step after which a run hangs."""
    return max(_LEAST_SECONDS, _STEPS * seconds_per_step)


class Watchdog:
    """The process that watches this rank's heartbeat, from the constructor to `close`."""

    def __init__(self, limit: float = 0.0, *, ranks_change: bool = False) -> None:
        """Watch the connection to other ranks, with this limit in seconds; 0: until one is learned.

        Where the set of ranks may change, others go on without one that is stopped: `ranks_change` has it
        killed.
        """
        shared = os.memfd_create("heartbeat")
        os.ftruncate(shared, mmap.PAGESIZE)
        self.heartbeat = Heartbeat(shared)
        self._limit = limit or _FIRST_STEP_SECONDS
        self.heartbeat.watch(self._limit)
        self._stacks = os.memfd_create("stacks")
        # Its handler is written in C: it runs without Python's lock.
        faulthandler.register(DUMP, file=self._stacks, all_threads=True)
        read_end, self._told = os.pipe()
        watched = {
            "rank": read_launch_env().rank,
            "host": escape_controls(socket.gethostname()),
            "pid": os.getpid(),
            "heartbeat": shared,
            "stacks": self._stacks,
            "told": read_end,
            "ranks_change": ranks_change,
        }
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, _PACKAGES, json.dumps(watched)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)  # the process inherits the mask
        # A session of its own: signals to the rank's process group, SIGSTOP among them, do not reach it.
        descriptors = (shared, self._stacks, read_end)
        self._process = subprocess.Popen(command, pass_fds=descriptors, start_new_session=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read_end)
        os.close(shared)  # the memory stays

    def watch_ranks(self, rank: int, hosts: Sequence[str], folder: Path) -> None:
        """Watch ranks on these hosts, which share `folder` for reports; without hosts, the connection."""
        told = {"rank": rank, "hosts": list(map(escape_controls, hosts)), "folder": str(folder.absolute())}
        try:
            os.write(self._told, f"{json.dumps(told)}\n".encode())
        except BrokenPipeError:
            print_error(f"warning: the watchdog of rank {rank} has ended: nobody notices if this rank hangs")
        self.heartbeat.watch(self._limit)
        self.heartbeat.begin(CONNECTING)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._told)
        faulthandler.unregister(DUMP)
        os.close(self._stacks)


class NoWatchdog(Watchdog):
    """Watches nothing: a rank alone waits for no other, and may be a notebook, which must not be killed."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()

    def watch_ranks(self, rank: int, hosts: Sequence[str], folder: Path) -> None:
        """Watch nothing."""

    def close(self) -> None:
        """End nothing."""


def watchdog_for(limit: float) -> Watchdog:
    """Return a watchdog with this limit in seconds; one rank alone has none if the limit is 0."""
    return Watchdog(limit) if limit or read_launch_env().size > 1 else NoWatchdog()
