"""What was looked at and how it is: one finding, and equal findings of several ranks as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from horovod_volo.core.errors import UserError


class Level(StrEnum):
    """How bad it is."""

    FAILURE = "failure"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, on one rank."""

    level: Level
    subject: str
    text: str
    remedy: str = ""  # what to do; ok needs none


@dataclass(frozen=True)
class Told:
    """A finding, and the ranks it holds for."""

    finding: Finding
    ranks: tuple[int, ...]


def ok(subject: str, text: str) -> Finding:
    """Say that something is as it should be."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Say that something works, but badly."""
    return Finding(Level.WARNING, subject, text, remedy)


def failure(subject: str, text: str, remedy: str) -> Finding:
    """Say that something does not work."""
    return Finding(Level.FAILURE, subject, text, remedy)


def from_error(subject: str, problem: UserError) -> Finding:
    """Make a failure of an error that carries its remedy after its first sentence."""
    text, _, remedy = str(problem).partition(". ")
    return failure(subject, text.rstrip("."), remedy)


def attempt(subject: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Look at something; what goes wrong on the way is a finding too."""
    try:
        return list(look())
    except UserError as problem:
        return [from_error(subject, problem)]
    except Exception as problem:  # whatever a broken installation raises
        told = (str(problem).splitlines() or [""])[0]
        text = f"cannot be looked at: {type(problem).__name__}: {told}".rstrip(": ")
        return [failure(subject, text, "Mend what the message names, and run this again.")]


def merged(by_rank: Sequence[Sequence[Finding]]) -> list[Told]:
    """Make one of equal findings of several ranks: failures first, then warnings, each in order of asking."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in dict.fromkeys(findings):
            ranks.setdefault(finding, []).append(rank)
    subjects = list(dict.fromkeys(finding.subject for finding in ranks))
    levels = list(Level)
    told = [Told(finding, tuple(holders)) for finding, holders in ranks.items()]
    return sorted(
        told,
        key=lambda one: (levels.index(one.finding.level), subjects.index(one.finding.subject), one.ranks),
    )
