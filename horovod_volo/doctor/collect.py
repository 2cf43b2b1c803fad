"""Collects the findings of all ranks, and runs the checks that need several ranks.

A separate thread calls Horovod. The main thread keeps a time limit and receives SIGTERM, which the launcher
sends when another rank has failed; a thread that waits inside Horovod can do neither.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import RankLostError
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.doctor.consistency import check_clocks, check_consistency
from horovod_volo.doctor.finding import Finding, failure, from_error
from horovod_volo.doctor.network import check_allreduce
from horovod_volo.doctor.shared_folder import check_shared_folder

CONNECT_SECONDS, CHECK_SECONDS = 60.0, 120.0
SUBJECT = "ranks"


@dataclass
class CollectedFindings:
    """The findings of all ranks so far; the collecting thread appends to it."""

    world: World | None = None
    findings: list[list[Finding]] = field(default_factory=list)  # by rank
    hosts: list[str] = field(default_factory=list)  # by rank
    problem: Finding | None = None  # why the findings are incomplete
    already_reported: bool = False  # the problem follows from another finding or another rank's failure


class _TerminatedError(Exception):
    """The launcher sent SIGTERM."""


def collect_findings(own: list[Finding], binding: Binding, folder: Path) -> CollectedFindings:
    """Connect all ranks, gather their `own` findings and run the checks between ranks. Collective."""
    collected = CollectedFindings()
    if any(finding.subject == "horovod" and finding.level == "failure" for finding in own):
        text = "cannot connect without a working Horovod"
        collected.problem = failure(SUBJECT, text, "Repair Horovod first.")
        collected.already_reported = True
        return collected
    connected = threading.Event()
    thread = threading.Thread(target=_collect, args=(collected, connected, own, binding, folder), daemon=True)
    by_launcher = read_launch_env().size > 1  # otherwise SIGTERM ends the doctor
    if by_launcher:
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        thread.start()
        if not connected.wait(CONNECT_SECONDS):
            collected.problem = _incomplete(f"did not connect within {CONNECT_SECONDS:.0f} s")
            return collected
        thread.join(CHECK_SECONDS)
        if thread.is_alive():
            collected.problem = _incomplete(f"did not finish the checks within {CHECK_SECONDS:.0f} s")
    except _TerminatedError:
        text = "the launcher ended this rank while it waited for the others: one of them has failed"
        collected.problem, collected.already_reported = _incomplete(text), True
    finally:
        if by_launcher:
            # Print the report first; the launcher can still send SIGKILL.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return collected


def _collect(
    collected: CollectedFindings,
    connected: threading.Event,
    own: list[Finding],
    binding: Binding,
    folder: Path,
) -> None:
    """Store findings in `collected` as they arrive. Collective: every rank calls this."""
    try:
        collected.world = world = World.connect(binding)
        connected.set()
        collected.hosts = world.hosts()
        collected.findings = [list(findings) for findings in world.allgather_object(own)]
        check_folder = partial(check_shared_folder, folder)
        for check in (check_consistency, check_folder, check_clocks, check_allreduce):
            by_rank = world.allgather_object(_run_collective_check(check, world))
            for findings, more in zip(collected.findings, by_rank, strict=True):
                findings += more
    except UserError as error:
        collected.problem = from_error(SUBJECT, error)
    except RankLostError:
        collected.problem = _incomplete("one of them exited during the checks")
    except Exception as error:  # Horovod raises many types when ranks cannot connect
        collected.problem = _incomplete(f"cannot connect: {type(error).__name__}: {error}")
    finally:
        connected.set()


def _incomplete(text: str) -> Finding:
    return failure(SUBJECT, text, "See what the other ranks and the launcher print.")


def _run_collective_check(check: Callable[[World], list[Finding]], world: World) -> list[Finding]:
    """Run a check between ranks; an error that all ranks raise becomes a failure."""
    try:
        return check(world)
    except UserError as error:
        return [from_error(SUBJECT, error)]


def _on_sigterm(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise _TerminatedError
