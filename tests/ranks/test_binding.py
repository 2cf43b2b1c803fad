"""The binding that a run reports is that of its processes, as the kernel reports it."""

import json
import os
from pathlib import Path

import pytest
import torch

from horovod_volo.cluster.pinning import bind
from tests.ranks.launching import python, run
from tests.runs import SMALL

ALLOWED_CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(ALLOWED_CPUS) < 2, reason="two ranks need a CPU each")


def test_binding_none_changes_nothing(monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("SIZE", "2"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    bind("none")
    assert sorted(os.sched_getaffinity(0)) == ALLOWED_CPUS


@pytest.mark.parametrize("by_launcher", ["none", "core"])
def test_a_run_has_the_binding_that_it_reports(images, tmp_path, by_launcher):
    """Also if the launcher has bound the ranks. Horovod's timeline and its tuning are written, too."""
    line, tried = tmp_path / "line.json", tmp_path / "tried.csv"
    variables = {"HOROVOD_TIMELINE": str(line), "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(tried)}
    command = ["mpirun", "-np", "2", "-bind-to", by_launcher, "-map-by", "slot", *python(plain=True)]
    flags = (*SMALL, "--output", str(tmp_path), "--name", "run", "--plugin", "tests.ranks.bound")
    train = [*command, "-m", "horovod_volo.train", str(images), *flags]
    done = run(train, BOUND=str(tmp_path), **variables)
    assert done.returncode == 0, done.stdout
    bindings = json.loads((tmp_path / "run" / "environment.json").read_text())["bindings"]
    threads = [torch.load(Path(tmp_path, f"rank_{rank}.pt"), weights_only=True) for rank in range(2)]
    assert {cpus[0] for cpus in threads} == set(map(str, ALLOWED_CPUS[:2]))
    for cpus, reported in zip(threads, bindings, strict=True):
        assert len(cpus) > 3  # of all threads, including Horovod's
        assert set(cpus) == {cpus[0]}
        assert reported == f"cpu; 1 thread on CPU {cpus[0]}"
        warning = f"the launcher bound this rank to CPUs {cpus[0]}: --binding does not change that"
        assert (warning in done.stdout) == (by_launcher == "core")
    assert "allreduce" in line.read_text()
    assert "tensor_fusion_threshold" in tried.read_text()
