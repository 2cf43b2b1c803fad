"""Formats the merged findings of all ranks as text and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from horovod_volo.cluster.topology import cpu_ranges
from horovod_volo.core.errors import escape_controls
from horovod_volo.doctor.finding import Level, MergedFinding

_WIDTH = 110
_MARKS = {Level.FAILURE: "FAILURE", Level.WARNING: "warning", Level.OK: "ok"}


@dataclass(frozen=True)
class Report:
    """The findings of a run of the doctor, and its ranks."""

    ranks: int  # that the launcher started
    hosts: tuple[str, ...]  # of each rank that reported: all, or only rank 0
    launcher: str
    controller: str
    findings: tuple[MergedFinding, ...]

    @property
    def failed(self) -> bool:
        """Return whether there is a failure."""
        return self._count(Level.FAILURE) > 0

    def record(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "failures": self._count(Level.FAILURE),
            "warnings": self._count(Level.WARNING),
            "ranks": self.ranks,
            "hosts": list(self.hosts),
            "launcher": self.launcher,
            "controller": self.controller,
            "findings": [
                {**asdict(one.finding), "level": one.finding.level.value, "ranks": list(one.ranks)}
                for one in self.findings
            ],
        }

    def text(self) -> str:
        """Return the report for a terminal, with failures first."""
        subject_width = max((len(one.finding.subject) for one in self.findings), default=0)
        lines = [self._title()]
        for _, of_level in groupby(self.findings, key=lambda one: one.finding.level):
            lines.append("")
            for one in of_level:
                lines += _lines(one, subject_width, self._ranks_text(one.ranks))
        return "\n".join([*lines, "", self._summary()])

    def _title(self) -> str:
        hosts = len(set(self.hosts))
        ranks = f"{_counted(self.ranks, 'rank')} on {_counted(hosts, 'host')}"
        if len(self.hosts) < self.ranks:
            ranks = f"only rank 0 of {self.ranks} reported"
        started = "no launcher" if self.launcher == "none" else f"{self.launcher} ({self.controller})"
        return f"{ranks}, {started}"

    def _ranks_text(self, ranks: Sequence[int]) -> str:
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
        return Counter(one.finding.level for one in self.findings)[level]


def _lines(merged: MergedFinding, width: int, ranks: str) -> list[str]:
    """Return the lines of one finding: level, subject, text and ranks, then the remedy."""
    finding = merged.finding
    text, remedy = escape_controls(finding.text), escape_controls(finding.remedy)
    head = f"{_MARKS[finding.level]:<8} {finding.subject:<{width}}  "
    lines = _wrapped(f"{text} ({ranks})" if ranks else text, head)
    return lines + _wrapped(remedy, f"{' ' * len(head)}-> ")  # no lines without a remedy


def _wrapped(text: str, head: str) -> list[str]:
    """Return the lines of a text after `head`, under which the further ones are indented."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
