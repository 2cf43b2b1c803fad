"""The doctor reports injected faults with their remedies, and nothing on a healthy machine."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launching import environment, launcher, python, run
from tests.unit.test_doctor import HARMLESS, SECRETS

PACKAGE = Path(__file__).parents[2] / "horovod_volo"
DOCTOR = ["-m", "horovod_volo.doctor"]
WITHOUT_PYTORCH = "rank 1: horovod: Horovod 0.28.1 was built without PyTorch. Build it"


@dataclass(frozen=True)
class DoctorRun:
    status: int
    output: str  # standard output and standard error of all ranks
    record: dict[str, Any]

    def of(self, subject: str) -> list[dict[str, Any]]:
        return [finding for finding in self.record["findings"] if finding["subject"] == subject]

    def failures(self) -> set[str]:
        return {finding["subject"] for finding in self.record["findings"] if finding["level"] == "failure"}

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
    folder: Path, *, ranks: int = 1, start_with: str = "none", before: str = "", **extra: str
) -> DoctorRun:
    """Run the doctor in a folder, on each rank after shell commands, with its rank in $RANK."""
    file = folder / "reported.json"
    script = f"RANK=${{HOROVOD_RANK:-${{OMPI_COMM_WORLD_RANK:-0}}}}; {before}\n"
    # A fork is for where nothing of the installation is replaced; horovodrun has other variables for it.
    script += f"exec {shlex.join([*python(start_with != 'mpi'), *DOCTOR, '--json', str(file)])} $MORE"
    launch = launcher(start_with, ranks, plain=True)
    done = run(["env", "-C", str(folder), *launch, "bash", "-c", script], **extra)
    assert file.exists(), done.stdout
    return DoctorRun(done.returncode, done.stdout, json.loads(file.read_text()))


@pytest.fixture(scope="module")
def horovod_without_pytorch(tmp_path_factory) -> str:
    """Copy the installed Horovod without its compiled libraries; return the folder."""
    spec = find_spec("horovod")
    assert spec is not None
    folder = tmp_path_factory.mktemp("without_pytorch")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(spec.origin).parent, folder / "horovod", ignore=ignored)
    return str(folder)


@pytest.mark.parametrize(("start_with", "ranks"), [("none", 1), ("gloo", 2), ("mpi", 2)])
def test_a_healthy_machine_has_no_failures(tmp_path, start_with, ranks):
    result = examine(tmp_path, ranks=ranks, start_with=start_with, **SECRETS, **HARMLESS)
    assert result.status == 0, result.output
    assert result.failures() == set()
    assert result.record["ranks"] == len(result.record["hosts"]) == ranks
    assert result.record["controller"] == {"none": "none", "gloo": "gloo", "mpi": "MPI"}[start_with]
    merged = {"python", "torch", "horovod", "mpirun", "dali", "timm", "gpu", "/dev/shm", "open files"}
    merged |= {"versions", "code", "settings", "ring"} if ranks > 1 else set()
    for subject in merged:
        assert [finding["ranks"] for finding in result.of(subject)] == [list(range(ranks))], subject
    bound = {rank for finding in result.of("binding") for rank in finding["ranks"]}
    assert bound == set(range(ranks))
    assert result.only("shared folder", "ok")["text"].startswith("runs: ")
    assert result.output.count("0 failures, ") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reported.json"]
    if start_with != "gloo":
        assert result.of("environment") == []
        return
    # horovodrun shows the names of secrets to users of the host.
    found = result.only("environment", "warning")
    names = found["text"].rpartition(": ")[2].split(", ")
    assert set(SECRETS) <= set(names)
    assert not set(HARMLESS) & set(names)
    assert not any(value in result.output for value in ("it's one", "two three", "four"))
    assert "jobs/horovodrun.sh" in found["remedy"]
    assert found["ranks"] == [0, 1]


def test_a_horovod_without_pytorch_is_reported(tmp_path, horovod_without_pytorch):
    """The JSON on stdout is valid, although Horovod prints to stdout too."""
    variables = environment(PYTHONPATH=f"{horovod_without_pytorch}:{PACKAGE.parent}")
    command = [sys.executable, *DOCTOR, "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    (found,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["level"] == "failure"]
    assert (found["subject"], found["text"]) == ("horovod", "Horovod 0.28.1 was built without PyTorch")
    assert "horovod-volo build-horovod --install" in found["remedy"]


def test_rank_0_reports_that_another_rank_has_failed(tmp_path, horovod_without_pytorch):
    broken = f'if [ "$RANK" = 1 ]; then export PYTHONPATH={horovod_without_pytorch}; fi'
    began = time.monotonic()
    result = examine(tmp_path, ranks=2, start_with="gloo", before=broken)
    assert time.monotonic() - began < 60
    assert result.status == 1
    assert "one of them has failed" in result.only("ranks", "failure")["text"]
    assert result.only("horovod", "ok")["ranks"] == [0]
    assert result.output.count(WITHOUT_PYTORCH) == 1


def test_a_size_that_horovod_does_not_report_is_a_failure(tmp_path):
    """Open MPI's variables announce two ranks; Horovod uses gloo without its launcher and reports one."""
    variables = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": socket.gethostname(),
    }
    result = examine(tmp_path, **variables)
    assert result.status == 1
    found = result.only("ranks", "failure")
    assert found["text"].startswith("mpirun started 2 ranks, but Horovod sees 1")
    assert "horovodrun --gloo" in found["remedy"]
    assert result.failures() == {"ranks"}
    assert "only rank 0 of 2 reported" in result.output


def test_differences_between_ranks_are_reported(tmp_path):
    """One byte of code, one variable of NCCL, and two folders that are not shared."""
    other = tmp_path / "other"
    shutil.copytree(PACKAGE, other / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    changed = other / PACKAGE.name / "models" / "volo.py"
    changed.write_bytes(changed.read_bytes().replace(b"\n", b" ", 1))
    before = f'if [ "$RANK" = 1 ]; then export PYTHONPATH={other} NCCL_ALGO=Tree; fi; mkdir folder_$RANK; '
    result = examine(tmp_path, ranks=2, start_with="gloo", before=f'{before} MORE="--shared folder_$RANK"')
    assert result.status == 1
    assert result.failures() == {"code", "settings", "shared folder"}
    code, settings = result.only("code", "failure"), result.only("settings", "failure")
    assert code["text"].startswith("models/volo.py is ")
    assert "same commit" in code["remedy"]
    assert settings["text"] == "NCCL_ALGO is Tree, on rank 0 missing"
    assert code["ranks"] == settings["ranks"] == [1]
    failures = [finding for finding in result.of("shared folder") if finding["level"] == "failure"]
    assert [finding["ranks"] for finding in failures] == [[0], [1]]
    assert failures[0]["text"].startswith("folder_0: is not shared: ranks 1 ")
    assert failures[1]["text"].startswith("folder_1: is not shared: ranks 0 ")
    assert list(tmp_path.glob("folder_?/*")) == list(tmp_path.glob("folder_?/.*")) == []
