"""Findings of the checks, and the report that merges those of all ranks."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

from horovod_volo.cluster.launch_env import LaunchEnv
from horovod_volo.cluster.topology import cpu_ranges
from horovod_volo.core.errors import UserError, counted, escape_controls

LEVELS = ("failure", "warning", "ok")  # the most severe first
_WIDTH = 110


@dataclass(frozen=True)
class Finding:
    """The result of one check on one rank."""

    level: Literal["failure", "warning", "ok"]
    text: str
    remedy: str = ""  # empty for ok
    subject: str = ""  # name of the check


Check = Callable[[], Iterable[Finding]]
ok = partial(Finding, "ok")
warning = partial(Finding, "warning")  # it works, but slowly or at a risk
failure = partial(Finding, "failure")  # it does not work


def from_error(error: UserError) -> Finding:
    """Return a failure with the first sentence of an error as text, and the others as remedy."""
    text, _, remedy = str(error).partition(". ")
    return failure(text.rstrip("."), remedy)


def run_check(subject: str, check: Check) -> list[Finding]:
    """Return the findings of a check under its subject; an exception in it becomes a failure."""
    try:
        found = list(check())
    except UserError as error:
        found = [from_error(error)]
    except Exception as error:  # a broken installation may raise anything
        text = f"the check raised {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        found = [failure(text, "Repair what the message names, then run the doctor again.")]
    return [replace(finding, subject=finding.subject or subject) for finding in found]


def build_report(
    launch: LaunchEnv, by_rank: list[list[Finding]], hosts: list[str], controller: str
) -> dict[str, Any]:
    """Return the report as --json writes it: equal findings of ranks merged, failures first.

    `by_rank` and `hosts` are of the ranks that reported: all, or only rank 0.
    """
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in dict.fromkeys(findings):
            ranks.setdefault(finding, []).append(rank)
    subjects = list(dict.fromkeys(finding.subject for finding in ranks))  # in the order of the checks
    merged = [{**asdict(finding), "ranks": having_it} for finding, having_it in ranks.items()]
    merged.sort(key=lambda one: (LEVELS.index(one["level"]), subjects.index(one["subject"]), one["ranks"]))
    counts = Counter(finding["level"] for finding in merged)
    return {
        "failures": counts["failure"],
        "warnings": counts["warning"],
        "ranks": launch.size,
        "hosts": hosts,
        "launcher": launch.launcher,
        "controller": controller,
        "findings": merged,
    }


def format_report(report: Mapping[str, Any]) -> str:
    """Return a report as text for a terminal."""
    size, hosts, findings = report["ranks"], report["hosts"], report["findings"]
    who = f"{counted(size, 'rank')} on {counted(len(set(hosts)), 'host')}"
    if len(hosts) < size:
        who = f"only rank 0 of {size} reported"
    launcher = f"{report['launcher']} ({report['controller']})"
    lines = [f"{who}, {'no launcher' if report['launcher'] == 'none' else launcher}"]
    width = max((len(finding["subject"]) for finding in findings), default=0)
    for level, of_level in groupby(findings, key=lambda finding: str(finding["level"])):
        mark = level.upper() if level == "failure" else level
        lines.append("")
        for finding in of_level:
            head = f"{mark:<8} {finding['subject']:<{width}}  "
            ranks = f" (ranks {cpu_ranges(finding['ranks'])} of {size})"
            lines += _wrapped(head, finding["text"] + (ranks if len(finding["ranks"]) < len(hosts) else ""))
            lines += _wrapped(f"{'':<{len(head)}}-> ", finding["remedy"])
    counts = f"{counted(report['failures'], 'failure')}, {counted(report['warnings'], 'warning')}."
    return "\n".join([*lines, "", counts])


def _wrapped(head: str, text: str) -> list[str]:
    """Return the lines of a text after `head`, under which the further ones are indented."""
    wrap = textwrap.TextWrapper(_WIDTH, head, " " * len(head), break_on_hyphens=False, break_long_words=False)
    return wrap.wrap(escape_controls(text))
