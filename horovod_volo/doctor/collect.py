"""Collects the findings of all ranks, and runs the checks that need several ranks.

A separate thread calls Horovod. The main thread keeps a time limit and receives SIGTERM, which the launcher
sends when another rank has failed; a thread that waits inside Horovod can do neither.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import RankLostError
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.doctor.between_ranks import list_checks
from horovod_volo.doctor.report import Finding, failure, from_error

_SECONDS = 120.0


@dataclass
class CollectedFindings:
    """The findings of all ranks so far; the collecting thread adds to it."""

    by_rank: list[list[Finding]] = field(default_factory=list)  # empty: not connected
    hosts: list[str] = field(default_factory=list)  # by rank
    world: World | None = None
    problem: Finding | None = None  # why the findings are incomplete
    another_failed: bool = False  # that is the reason, and the other rank prints it


class _TerminatedError(Exception):
    """The launcher sent SIGTERM."""


def collect_findings(own: list[Finding], binding: Binding, folder: Path) -> CollectedFindings:
    """Connect all ranks, gather their `own` findings and run the checks between ranks. Collective."""
    collected = CollectedFindings()
    thread = threading.Thread(target=_collect, args=(collected, own, binding, folder), daemon=True)
    by_launcher = read_launch_env().size > 1  # otherwise SIGTERM ends the doctor
    if by_launcher:
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        thread.start()
        thread.join(_SECONDS)
        if thread.is_alive():
            what = "finish the checks" if collected.world else "connect"
            collected.problem = _incomplete(f"did not {what} within {_SECONDS:.0f} s")
    except _TerminatedError:
        text = "the launcher ended this rank while it waited for the others: one of them has failed"
        collected.problem, collected.another_failed = _incomplete(text), True
    finally:
        if by_launcher:
            # Print the report first; the launcher can still send SIGKILL.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return collected


def _collect(collected: CollectedFindings, own: list[Finding], binding: Binding, folder: Path) -> None:
    """Store findings in `collected` as they arrive. Collective: every rank calls this."""
    try:
        collected.world = world = World.connect(binding)
        collected.hosts = world.hosts()
        collected.by_rank = world.allgather_object(own)
        for subject, check in list_checks(world, folder).items():
            try:
                found = [replace(each, subject=subject) for each in check()]
            except UserError as error:  # raised on all ranks
                found = [replace(from_error(error), subject=subject)]
            for findings, more in zip(collected.by_rank, world.allgather_object(found), strict=True):
                findings += more
    except UserError as error:
        collected.problem = replace(from_error(error), subject="ranks")
    except RankLostError:
        collected.problem = _incomplete("one of them exited during the checks")
    except Exception as error:  # Horovod raises many types when ranks cannot connect
        collected.problem = _incomplete(f"cannot connect: {type(error).__name__}: {error}")


def _on_sigterm(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise _TerminatedError


_incomplete = partial(failure, remedy="See what the other ranks and the launcher print.", subject="ranks")
