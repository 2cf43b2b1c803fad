"""The findings of all ranks as text and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from horovod_volo.cluster.topology import cpu_ranges
from horovod_volo.doctor.finding import Level, Told

_WIDTH = 110
_MARKS = {Level.FAILURE: "FAILURE", Level.WARNING: "warning", Level.OK: "ok"}


@dataclass(frozen=True)
class Report:
    """What was found, and by whom."""

    ranks: int  # that the launcher started
    hosts: tuple[str, ...]  # of each rank that was heard: all, or rank 0 alone
    launcher: str
    controller: str
    findings: tuple[Told, ...]

    @property
    def failed(self) -> bool:
        """Say whether something does not work."""
        return self._count(Level.FAILURE) > 0

    def record(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return {
            "failures": self._count(Level.FAILURE),
            "warnings": self._count(Level.WARNING),
            "ranks": self.ranks,
            "hosts": list(self.hosts),
            "launcher": self.launcher,
            "controller": self.controller,
            "findings": [
                {**asdict(told.finding), "level": told.finding.level.value, "ranks": list(told.ranks)}
                for told in self.findings
            ],
        }

    def text(self) -> str:
        """Return it for a terminal: what is wrong first."""
        subject = max((len(told.finding.subject) for told in self.findings), default=0)
        lines = [self._title(), ""]
        level = None
        for told in self.findings:
            if level not in (None, told.finding.level):
                lines.append("")
            level = told.finding.level
            lines += _lines(told, subject, self._whose(told.ranks))
        return "\n".join([*lines, "", self._summary()])

    def _title(self) -> str:
        hosts = len(set(self.hosts))
        where = f"{_counted(self.ranks, 'rank')} on {_counted(hosts, 'host')}"
        if len(self.hosts) < self.ranks:
            where = f"only rank 0 of {self.ranks} was heard"
        started = "no launcher" if self.launcher == "none" else f"{self.launcher} ({self.controller})"
        return f"{where}, {started}"

    def _whose(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.hosts):
            return ""
        return f"rank{'s' if len(ranks) > 1 else ''} {cpu_ranges(ranks)} of {self.ranks}"

    def _summary(self) -> str:
        failures, warnings = self._count(Level.FAILURE), self._count(Level.WARNING)
        if failures:
            return f"{_counted(failures, 'failure')}, {_counted(warnings, 'warning')}."
        if warnings:
            return f"Nothing failed; {_counted(warnings, 'warning')}."
        return "Everything is well."

    def _count(self, level: Level) -> int:
        return Counter(told.finding.level for told in self.findings)[level]


def _lines(told: Told, width: int, whose: str) -> list[str]:
    """Lay one finding out: mark, subject, text, whose it is; below it the remedy."""
    finding = told.finding
    head = f"{_MARKS[finding.level]:<8} {finding.subject:<{width}}  "
    margin = " " * len(head)
    text = f"{finding.text} ({whose})" if whose else finding.text
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=margin,
        break_on_hyphens=False,
        break_long_words=False,
    )
    if finding.remedy:
        lines += textwrap.wrap(
            finding.remedy,
            _WIDTH,
            initial_indent=f"{margin}-> ",
            subsequent_indent=f"{margin}   ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
