"""Every command of docs/cluster.md is run by a test, or marked as one that needs the cluster."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.ranks.launching import run

ROOT = Path(__file__).parents[2]
CLUSTER_TESTS = "".join(file.read_text() for file in sorted((ROOT / "tests/cluster").glob("test_*.py")))
SCRIPT = re.compile(r"jobs/[\w.]+\.(?:sbatch|sh)")
MARK = "# on the cluster"
SOURCED = ("env.sh", "over_ssh.sh", "under_slurm.sh")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), flags=re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


OF_THE_DOCTOR = [
    command for command in commands() if "horovod_volo.doctor" in command and MARK not in command
]


def test_every_command_is_run_or_marked() -> None:
    others = [command for command in commands() if MARK not in command and command not in OF_THE_DOCTOR]
    assert len(others) > 5
    for command in others:
        scripts = [script for script in SCRIPT.findall(command) if script != "jobs/env.sh"]
        assert len(scripts) == 1, command
        assert (ROOT / scripts[0]).is_file(), command
        # By the cluster tests, on a Slurm or on hosts of their own.
        assert Path(scripts[0]).name in CLUSTER_TESTS, command


def test_every_job_script_is_run_or_marked() -> None:
    for script in sorted((ROOT / "jobs").glob("*")):
        if script.suffix in (".sbatch", ".sh") and "not run" not in script.read_text():
            assert script.name in CLUSTER_TESTS or script.name in (
                "env.sh",
                "over_ssh.sh",
                "under_slurm.sh",
            ), script.name


@pytest.mark.parametrize("command", OF_THE_DOCTOR)
def test_the_doctor_examines_this_machine(command: str, tmp_path: Path) -> None:
    small = command.replace("doctor.json", str(tmp_path / "doctor.json"))
    done = run(["bash", "-c", f"cd {shlex.quote(str(ROOT))} && {small} --shared {tmp_path}"], seconds=120)
    assert done.returncode == 0, done.stdout
    if "--json" in command:
        report = json.loads((tmp_path / "doctor.json").read_text())
        assert {finding["level"] for finding in report["findings"]} <= {"ok", "warning"}
