"""All ranks asked at once, and what can still be told where they do not come together.

The asking runs in a thread of its own: the main thread keeps the time, and hears when the launcher ends
this rank because another one has failed. Both would be deaf inside Horovod.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import RankLostError
from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.doctor.clock import look_at_clocks
from horovod_volo.doctor.finding import Finding, failure, from_error
from horovod_volo.doctor.network import look_at_ring
from horovod_volo.doctor.sameness import look_for_differences
from horovod_volo.doctor.shared_folder import look_at_shared_folder

MEET_SECONDS, ASK_SECONDS = 60.0, 120.0
SUBJECT = "ranks"
_OTHERS = "See what the other ranks say, and the launcher's own messages."


@dataclass
class Heard:
    """What has been heard so far; the asking thread adds to it."""

    world: World | None = None
    findings: list[list[Finding]] = field(default_factory=list)  # by rank
    hosts: list[str] = field(default_factory=list)  # by rank
    problem: Finding | None = None  # why not all was heard
    follows: bool = False  # from something that is told anyway


class _EndedError(Exception):
    """The launcher has told this process to end."""


def consult(own: list[Finding], bound: Binding, folder: Path) -> Heard:
    """Meet all ranks and ask each everything. Collective: every rank calls this."""
    heard = Heard()
    if any(finding.subject == "horovod" and finding.level == "failure" for finding in own):
        text = "cannot meet without a Horovod that works"
        heard.problem, heard.follows = failure(SUBJECT, text, "Mend Horovod first."), True
        return heard
    met = threading.Event()
    asking = threading.Thread(target=_ask, args=(heard, met, own, bound, folder), daemon=True)
    signal.signal(signal.SIGTERM, _end)
    try:
        asking.start()
        if not met.wait(MEET_SECONDS):
            heard.problem = failure(SUBJECT, f"have not met within {MEET_SECONDS:.0f} s", _OTHERS)
            return heard
        asking.join(ASK_SECONDS)
        if asking.is_alive():
            heard.problem = failure(SUBJECT, f"have not answered within {ASK_SECONDS:.0f} s", _OTHERS)
    except _EndedError:
        text = "the launcher ended this rank while it waited for the others: one of them has failed"
        heard.problem, heard.follows = failure(SUBJECT, text, _OTHERS), True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the report comes first; the launcher can still kill
    return heard


def _ask(heard: Heard, met: threading.Event, own: list[Finding], bound: Binding, folder: Path) -> None:
    """Ask everything and keep the answers as they come. Collective: every rank calls this."""
    try:
        heard.world = world = World.connect(bound)
        met.set()
        heard.hosts = world.hosts()
        heard.findings = [list(findings) for findings in world.allgather_object(own)]
        for look in _joint(folder):
            for findings, more in zip(
                heard.findings, world.allgather_object(_looked(look, world)), strict=True
            ):
                findings += more
    except UserError as problem:
        heard.problem = from_error(SUBJECT, problem)
    except RankLostError:
        heard.problem = failure(SUBJECT, "one of them left before all was asked", _OTHERS)
    except Exception as problem:  # what Horovod raises where ranks cannot meet has many types
        text = f"do not come together: {type(problem).__name__}: {problem}"
        heard.problem = failure(SUBJECT, text, _OTHERS)
    finally:
        met.set()


def _joint(folder: Path) -> Sequence[Callable[[World], list[Finding]]]:
    return (
        look_for_differences,
        lambda world: look_at_shared_folder(folder, world),
        look_at_clocks,
        look_at_ring,
    )


def _looked(look: Callable[[World], list[Finding]], world: World) -> list[Finding]:
    """Look at something together; a mistake that all ranks were told of is a finding."""
    try:
        return look(world)
    except UserError as problem:
        return [from_error(SUBJECT, problem)]


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise _EndedError
