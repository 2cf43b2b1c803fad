"""Runs the doctor for a test on one rank or several, and returns its report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks.launching import launcher, run

SECONDS = 120


@dataclass(frozen=True)
class DoctorRun:
    """Exit status, output and JSON report of one run of the doctor."""

    status: int
    output: str  # standard output and standard error of all ranks
    record: dict[str, Any]

    def of(self, subject: str) -> list[dict[str, Any]]:
        """Return the findings on a subject."""
        return [finding for finding in self.record["findings"] if finding["subject"] == subject]

    def at(self, level: str) -> list[dict[str, Any]]:
        """Return the findings of a level."""
        return [finding for finding in self.record["findings"] if finding["level"] == level]

    def only(self, subject: str, level: str) -> dict[str, Any]:
        """Return the only finding on a subject at a level; the text must contain it and its remedy."""
        found = [finding for finding in self.of(subject) if finding["level"] == level]
        assert len(found) == 1, self.output
        printed = " ".join(line.partition("<stdout>:")[2] or line for line in self.output.splitlines())
        printed = " ".join(printed.split())
        assert found[0]["text"] in printed
        assert level == "ok" or f"-> {found[0]['remedy']}" in printed
        return found[0]


def examine(
    folder: Path,
    *flags: str,
    ranks: int = 1,
    start_with: str = "none",
    before: str = "",
    after: str = "",
    inside: Sequence[str] = (),
    **extra: str,
) -> DoctorRun:
    """Run the doctor in a folder, on each rank between shell commands, with its rank in $RANK."""
    file = folder / "reported.json"
    doctor = shlex.join([sys.executable, "-m", "horovod_volo.doctor", "--json", str(file), *flags])
    script = f"RANK=${{HOROVOD_RANK:-${{OMPI_COMM_WORLD_RANK:-0}}}}; {before}\n"
    script += f"{doctor} $MORE; status=$?; {after}; exit $status" if after else f"exec {doctor} $MORE"
    command = [
        "env",
        "-C",
        str(folder),
        *launcher(start_with, ranks, plain=True),
        *inside,
        "bash",
        "-ec",
        script,
    ]
    done = run(command, seconds=SECONDS, **extra)
    assert file.exists(), done.stdout
    return DoctorRun(done.returncode, done.stdout, json.loads(file.read_text()))
