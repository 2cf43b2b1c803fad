"""Ends a run that hangs: starts a process beside each rank that watches its heartbeat.

If no step ends within the limit, each rank's watchdog writes the stacks of the rank's threads into the run
folder, and kills the rank. One of them names the ranks that the others waited for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from horovod_volo.cluster import watchdog_process
from horovod_volo.cluster.watchdog_process import Heartbeat
from horovod_volo.cluster.world import World

_FIRST_STEP_SECONDS = 1800.0  # before the first log point: it may compile
_LEAST_SECONDS, _STEPS = 600.0, 50


def learned_limit(seconds_per_step: float) -> float:
    """Return the seconds without the end of a step after which a run hangs."""
    return max(_LEAST_SECONDS, _STEPS * seconds_per_step)


class Watchdog:
    """The process that watches this rank's heartbeat, from the constructor to `close`."""

    def __init__(self, heartbeat: Heartbeat, world: World, folder: Path, limit: float) -> None:
        """Start it with this limit in seconds; 0: until one is learned. Collective: every rank calls this."""
        self._heartbeat, self._collectives = heartbeat, world.collectives
        heartbeat.watch(limit or _FIRST_STEP_SECONDS)
        self._collectives.heartbeat = heartbeat
        self._stacks = os.memfd_create("stacks")
        # Its handler is written in C: it runs without Python's lock.
        faulthandler.register(watchdog_process.DUMP, file=self._stacks, all_threads=True)
        read_end, self._alive = os.pipe()
        watched: dict[str, Any] = {
            "rank": world.rank,
            "hosts": world.hosts(),
            "pid": os.getpid(),
            "folder": str(
                folder.absolute() / world.broadcast_object(f"{socket.gethostname()}-{os.getpid()}")
            ),
            "heartbeat": heartbeat.descriptor,
            "stacks": self._stacks,
            "alive": read_end,
        }
        command = [sys.executable, "-I", "-S", watchdog_process.__file__, json.dumps(watched)]
        descriptors = (heartbeat.descriptor, self._stacks, read_end)
        # A session of its own: signals to the rank's process group do not reach it.
        self._process = subprocess.Popen(command, pass_fds=descriptors, start_new_session=True)
        os.close(read_end)

    def close(self) -> None:
        """End the process."""
        self._heartbeat.watch(0.0)
        self._collectives.heartbeat = None
        os.close(self._alive)
        self._process.wait()
        faulthandler.unregister(watchdog_process.DUMP)
        os.close(self._stacks)
