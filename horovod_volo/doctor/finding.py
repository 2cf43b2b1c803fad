"""A finding is the result of one check on one rank; equal findings of several ranks are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from horovod_volo.core.errors import UserError


class Level(StrEnum):
    """How severe a finding is; the most severe comes first."""

    FAILURE = "failure"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """The result of one check on one rank."""

    level: Level
    subject: str
    text: str
    remedy: str = ""  # empty for ok


@dataclass(frozen=True)
class MergedFinding:
    """A finding and the ranks that have it."""

    finding: Finding
    ranks: tuple[int, ...]


def ok(subject: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that works, but slowly or at a risk."""
    return Finding(Level.WARNING, subject, text, remedy)


def failure(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(Level.FAILURE, subject, text, remedy)


def from_error(subject: str, error: UserError) -> Finding:
    """Return a failure with the first sentence of an error as text, and the others as remedy."""
    text, _, remedy = str(error).partition(". ")
    return failure(subject, text.rstrip("."), remedy)


def run_check(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check; an exception in it becomes a failure."""
    try:
        return list(check())
    except UserError as error:
        return [from_error(subject, error)]
    except Exception as error:  # a broken installation may raise anything
        first_line = (str(error).splitlines() or [""])[0]
        text = f"the check raised {type(error).__name__}: {first_line}".rstrip(": ")
        return [failure(subject, text, "Repair what the message names, then run the doctor again.")]


def merge_findings(by_rank: Sequence[Sequence[Finding]]) -> list[MergedFinding]:
    """Merge equal findings of several ranks; sort by level, then in the order of the checks."""
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in dict.fromkeys(findings):
            ranks_of.setdefault(finding, []).append(rank)
    subjects = list(dict.fromkeys(finding.subject for finding in ranks_of))
    levels = list(Level)
    merged = [MergedFinding(finding, tuple(ranks)) for finding, ranks in ranks_of.items()]
    return sorted(
        merged,
        key=lambda one: (levels.index(one.finding.level), subjects.index(one.finding.subject), one.ranks),
    )
