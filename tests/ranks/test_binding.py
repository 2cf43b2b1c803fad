"""The binding that a run reports is that of its processes, as the kernel reports it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_volo.cluster.pinning import bind
from horovod_volo.cluster.topology import cpu_ranges
from tests.ranks.bound import cpus_of_threads
from tests.ranks.launching import launcher, python, run
from tests.runs import start

ALLOWED_CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(ALLOWED_CPUS) < 2, reason="two ranks need a CPU each")


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Write a /sys in which each of this machine's first two CPUs is a NUMA node."""
    root = tmp_path / "host"
    node, cpu = root / "sys/devices/system/node", root / "sys/devices/system/cpu"
    files = {node / f"node{number}/cpulist": str(ALLOWED_CPUS[number]) for number in range(2)}
    files |= {node / f"node{number}/distance": ("10 20", "20 10")[number] for number in range(2)}
    files[cpu / "online"] = cpu_ranges(ALLOWED_CPUS[:2])
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def bound(out: Path, command: list[str], mode: str, root: Path) -> list[dict[str, Any]]:
    script = str(Path(__file__).parent / "bound.py")
    done = run([*command, *python(plain=True), script, str(out), mode, str(root)])
    assert done.returncode == 0, done.stdout
    return found_in(out)


def found_in(out: Path) -> list[dict[str, Any]]:
    return [torch.load(out / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def test_each_rank_has_its_node(two_nodes, tmp_path):
    found = bound(tmp_path, launcher("gloo", 2, plain=True), "numa", two_nodes)
    for rank, saved in enumerate(found):
        assert saved["cpus"] == [ALLOWED_CPUS[rank]]
        assert set(saved["threads"]) == {str(ALLOWED_CPUS[rank])}  # of all threads, including Horovod's
        assert len(saved["threads"]) >= 3
        assert saved["threads_of_torch"] == 1
        assert saved["warnings"] == []


def test_binding_none_changes_nothing(two_nodes, monkeypatch):
    for name in ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"):
        monkeypatch.setenv(name, "2")
    before = sorted(cpus_of_threads())
    bind("none", root=two_nodes)
    assert sorted(cpus_of_threads()) == before


def test_cpus_bound_by_the_launcher_are_not_changed(tmp_path):
    command = ["mpirun", "-np", "2", "-bind-to", "core", "-map-by", "slot"]
    found = bound(tmp_path, command, "core", Path("/"))
    assert {saved["threads"][0] for saved in found} == {str(cpu) for cpu in ALLOWED_CPUS[:2]}
    for saved in found:
        cpus = cpu_ranges(saved["cpus"])
        assert set(saved["threads"]) == {cpus}
        warning = f"the launcher bound this rank to CPUs {cpus}: --binding does not change that"
        assert saved["warnings"] == [warning]


def test_a_run_has_the_binding_that_it_reports(images, tmp_path):
    """Horovod's timeline and its tuning are written, too."""
    line, tried = tmp_path / "line.json", tmp_path / "tried.csv"
    variables = {"HOROVOD_TIMELINE": str(line), "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(tried)}
    plugin = ("--plugin", "tests.ranks.bound")
    start(images, tmp_path, *plugin, start_with="mpi", plain=True, BOUND=str(tmp_path), **variables)
    reported = json.loads((tmp_path / "run" / "environment.json").read_text())["bindings"]
    for rank, saved in enumerate(found_in(tmp_path)):
        assert len(saved["threads"]) > 3
        assert set(saved["threads"]) == {str(ALLOWED_CPUS[rank])}
        assert reported[rank] == f"cpu; 1 thread on CPU {ALLOWED_CPUS[rank]}"
    assert "allreduce" in line.read_text()
    assert "tensor_fusion_threshold" in tried.read_text()
