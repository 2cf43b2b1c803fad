"""The binding that a run reports is that of its processes, as the kernel reports it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horovod_volo.cluster.topology import cpu_ranges
from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import environment, launcher, ranks_of

ALLOWED_CPUS = sorted(os.sched_getaffinity(0))
two_cpus = pytest.mark.skipif(len(ALLOWED_CPUS) < 2, reason="two ranks need a CPU each")


def two_nodes(root: Path) -> Path:
    """Write a /sys in which each of this machine's first two CPUs is a NUMA node."""
    node, cpu = root / "sys/devices/system/node", root / "sys/devices/system/cpu"
    files = {node / f"node{number}/cpulist": str(ALLOWED_CPUS[number]) for number in range(2)}
    files |= {node / f"node{number}/distance": ("10 20", "20 10")[number] for number in range(2)}
    files[cpu / "online"] = cpu_ranges(ALLOWED_CPUS[:2])
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@two_cpus
@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_each_rank_has_its_node(tmp_path: Path, start_with: str) -> None:
    root = two_nodes(tmp_path / "host")
    found = ranks_of("binding", tmp_path, "numa", str(root), ranks=2, start_with=start_with, plain=True)
    for rank, saved in enumerate(found):
        assert saved["cpus"] == [ALLOWED_CPUS[rank]]
        assert saved["cpus_of_threads"] == [str(ALLOWED_CPUS[rank])]  # of all threads, including Horovod's
        assert saved["threads"] >= 3
        assert saved["threads_of_torch"] == 1
        assert saved["policy"] == ["default"]  # of the memory: the node of the CPU that touches it first
        assert saved["warnings"] == []


@two_cpus
def test_binding_none_changes_nothing(tmp_path: Path) -> None:
    root = two_nodes(tmp_path / "host")
    for saved in ranks_of("binding", tmp_path, "none", str(root), ranks=2, start_with="gloo", plain=True):
        assert saved["cpus_of_threads"] == [cpu_ranges(ALLOWED_CPUS)]


@two_cpus
def test_cpus_bound_by_the_launcher_are_not_changed(tmp_path: Path) -> None:
    command = ["mpirun", "-np", "2", "-bind-to", "core", "-map-by", "slot"]
    script = str(Path(__file__).parent / "worker_binding.py")
    subprocess.run(
        [*command, sys.executable, script, str(tmp_path), "core", "/"],
        check=True,
        env=environment(),
        timeout=120,
    )
    import torch

    found = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]
    assert {saved["cpus_of_threads"][0] for saved in found} == {str(cpu) for cpu in ALLOWED_CPUS[:2]}
    for saved in found:
        cpus = cpu_ranges(saved["cpus"])
        assert saved["cpus_of_threads"] == [cpus]
        assert saved["warnings"] == [
            f"the launcher bound this rank to CPUs {cpus}: --binding does not change that"
        ]


@two_cpus
@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_a_run_has_the_binding_that_it_reports(tmp_path: Path, start_with: str) -> None:
    """Inspect the processes of a training run while it runs."""
    images = tmp_path / "images"
    make_demo_set(images, train=64, val=16)
    command = [*launcher(start_with, 2, plain=True), sys.executable, "-m", "horovod_volo.train", str(images)]
    command += shlex.split(f"""
        --recipe demo --img-size 32 --batch-size 8 --epochs 500 --log-every 1 --output {tmp_path} --name run
        --horovod-timeline {tmp_path / "line.json"} --horovod-autotune {tmp_path / "tried.csv"}
    """)
    with (
        (tmp_path / "output").open("w") as log,
        subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        ) as run,
    ):
        try:
            reported = json.loads(first_text(tmp_path / "run" / "environment.json", run, seconds=90))[
                "bindings"
            ]
            first_text(tmp_path / "run" / "metrics.jsonl", run, seconds=60)
            ranks = ranks_training_on(str(images))
            assert sorted(ranks) == [0, 1]
            for rank, process in ranks.items():
                threads = list((process / "task").iterdir())
                assert len(threads) > 3
                assert {cpus_of(thread) for thread in threads} == {str(ALLOWED_CPUS[rank])}
                assert reported[rank] == f"cpu; 1 thread on CPU {ALLOWED_CPUS[rank]}"
            assert "allreduce" in (tmp_path / "line.json").read_text()
            assert "tensor_fusion_threshold" in (tmp_path / "tried.csv").read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def first_text(file: Path, run: subprocess.Popen[bytes], *, seconds: float) -> str:
    """Wait until a file has text and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and run.poll() is None:
        if file.exists() and (text := file.read_text()):
            return text
        time.sleep(0.1)
    pytest.fail(f"{file.name} was not written: {(file.parents[1] / 'output').read_text()}")


def ranks_training_on(images: str) -> dict[int, Path]:
    """Find the processes that train on these images, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().decode().split("\0")
            if (
                images in arguments
                and "horovod_volo.train" in arguments
                and Path(arguments[0]).name.startswith("python")
            ):
                of_process = dict(
                    line.partition("=")[::2]
                    for line in (process / "environ").read_bytes().decode().split("\0")
                )
                rank = of_process.get("HOROVOD_RANK") or of_process.get("OMPI_COMM_WORLD_RANK")
                if rank is not None:
                    found[int(rank)] = process
    return found


def cpus_of(thread: Path) -> str:
    """Return the CPUs that the kernel lets a thread run on."""
    lines = (thread / "status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
