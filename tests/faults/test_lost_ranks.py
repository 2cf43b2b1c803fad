"""A rank that ends, in whatever way: the run ends, leaves nothing behind, and resumes to the same weights."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from horovod_volo.elastic.ledger import check_ledger
from horovod_volo.engine.checkpoint.files import intact_checkpoints
from tests.ranks.launching import launcher, processes, python, run
from tests.runs import FAILED, SMALL, assert_same_state, start

EVERY = ("--checkpoint-every", "2", "--log-every", "1", "--ema-decay", "0.9", "--drop-path", "0.2")
EVERY += ("--resume", "auto")


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    start(images, output, *EVERY)
    return output


@pytest.mark.parametrize(
    "faults",
    [
        ["gloo 0:5:SIGKILL", "mpi 1:7:SIGKILL", "gloo 1:8:raise", "mpi 0:9:SIGSEGV"],
        pytest.param(
            ["gloo 1:0:SIGABRT", "mpi 1:0:SIGABRT", "mpi 0:5:SIGKILL", "mpi 1:7:raise", "gloo 1:9:exit"],
            marks=pytest.mark.soak,
        ),
        pytest.param(["mpi 1:9:exit"], marks=pytest.mark.soak),
    ],
)
def test_a_rank_ends(images, tmp_path, undisturbed, faults):
    """Each time the run resumes, another rank ends; at last a rank is stopped for a moment, to no effect."""
    for start_with, fault in map(str.split, faults):
        shown = start(images, tmp_path, *EVERY, fault=fault, start_with=start_with, status=FAILED, seconds=60)
        assert shown.count("RuntimeError: injected") == fault.endswith("raise"), shown
        assert processes(str(tmp_path)) == {}  # command lines of forks are their parent's
        assert fault.split(":")[1] == "0" or list(intact_checkpoints(tmp_path / "run"))
    start(images, tmp_path, *EVERY, fault="1:9:pause", start_with=start_with)
    assert list((tmp_path / "run" / "checkpoints").glob(".*")) == []
    assert_same_state(undisturbed, tmp_path)
    assert "1 epochs are complete" in check_ledger(tmp_path / "run")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "limit"), [(resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_AS, 2 << 30)], ids=["files", "memory"]
)
def test_a_rank_without_files_or_memory_ends_the_run(images, tmp_path, kind, limit):
    script = tmp_path / "limited.py"
    script.write_text(
        "import os, resource, runpy, sys\n"
        f"if os.environ['HOROVOD_RANK'] == '1': resource.setrlimit({kind}, ({limit}, {limit}))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_module('horovod_volo.train', run_name='__main__', alter_sys=True)\n"
    )
    command = [*launcher("gloo", 2, plain=True), *python(plain=True), str(script), "train", str(images)]
    done = run([*command, *SMALL, "--output", str(tmp_path / "runs")], seconds=100)
    assert done.returncode not in (0, 75), done.stdout
    assert processes(str(tmp_path)) == {}
