"""`--ranks N`: the ranks of one command behave like one process, and none is left however it ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest

from horovod_volo.cluster import pinning
from horovod_volo.cluster.launcher import resolve_ranks
from horovod_volo.cluster.world import World
from horovod_volo.config.arguments import AUTO
from horovod_volo.engine.banner import unused_gpus
from horovod_volo.train import main
from tests.ranks.launching import launcher, processes, python, run, started, wait_until
from tests.runs import MISTAKE, SMALL, STOPPED

FAILED, SECONDS = 1, 60


def command(images: Path, output: Path, *flags: str) -> list[str]:
    train = [*python(plain=True), "-m", "horovod_volo.train", str(images), *SMALL, "--ranks", "2"]
    return [*train, "--output", str(output), "--name", "run", "--log-every", "1", *flags]


@contextmanager
def training(images: Path, output: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Train on two ranks for the block, from the first step on."""
    flags += ("--epochs", "1000", "--images-every", "0", "--eval-every", "1000")
    with started(command(images, output, *flags)) as process:
        shown = list(takewhile(lambda line: not line.startswith("step "), process.stdout))
        assert shown[0] == "     world  2 ranks on 1 host, launcher horovod-volo, gloo controller\n"
        assert any("resumed  at step" in line for line in shown) == ("--resume" in flags)
        yield process


def end(process: subprocess.Popen[str], output: Path) -> tuple[int, str]:
    """Return status and output of a command that ends soon, and leaves no process."""
    shown, _ = process.communicate(timeout=SECONDS)
    wait_until(lambda: not processes(str(output)), 5, "the processes to end")
    return process.returncode, shown


def rank_process(output: Path, rank: int) -> int:
    wanted = f"HOROVOD_VOLO_RANK={rank}".encode()
    return next(pid for pid in processes(str(output)) if wanted in Path(f"/proc/{pid}/environ").read_bytes())


def test_ctrl_c_and_a_scheduler_save_once_and_the_run_resumes(images, tmp_path):
    """A terminal signals the process group, a scheduler perhaps each process. Lines have no prefix."""
    with training(images, tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        status, shown = end(process, tmp_path)
    assert (status, shown.count("SIGINT on rank 0: the run saves")) == (STOPPED, 1)
    step = re.search(r"\nstopped at step (\d+) and saved; resume with --resume auto\n$", shown)[1]
    with training(images, tmp_path, "--resume", "auto") as process:
        for each in processes(str(tmp_path)):
            os.kill(each, signal.SIGTERM)
        status, shown = end(process, tmp_path)
    assert (status, shown.count("SIGTERM on rank 0"), shown.count("stopped at step")) == (STOPPED, 1, 1)
    assert f"resumed  at step {step}" in (tmp_path / "run" / "log.txt").read_text()


def test_ctrl_c_that_ends_the_reader_of_the_output_saves(images, tmp_path):
    """As it does a `tee`."""
    with training(images, tmp_path) as process:
        process.stdout.close()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(SECONDS) == STOPPED
    assert "and saved" in (tmp_path / "run" / "log.txt").read_text()


def test_a_second_ctrl_c_ends_all_at_once(images, tmp_path):
    with training(images, tmp_path) as process:
        os.kill(rank_process(tmp_path, 1), signal.SIGSTOP)  # so that no step ends
        os.kill(process.pid, signal.SIGINT)
        assert any("saves a checkpoint" in line for line in process.stdout)
        os.kill(process.pid, signal.SIGINT)
        assert end(process, tmp_path)[0] == -signal.SIGINT


def test_a_rank_that_dies_is_named(images, tmp_path):
    with training(images, tmp_path) as process:
        os.kill(rank_process(tmp_path, 1), signal.SIGKILL)
        status, shown = end(process, tmp_path)
    assert status == FAILED
    assert shown.splitlines()[-1] == "error: rank 1 was ended by SIGKILL; the others stopped"


def test_ranks_die_with_the_launcher(images, tmp_path):
    with training(images, tmp_path) as process:
        process.kill()
        assert end(process, tmp_path)[0] == -signal.SIGKILL


def test_mistakes_are_printed_once(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert main([str(images), "--ranks", "2"]) == MISTAKE
    assert "Horovod is not installed" in capsys.readouterr().err
    under = run([*launcher("mpi", 2), *python(), "-m", "horovod_volo.train", str(images), "--ranks", "2"])
    assert (under.returncode, under.stdout.count("mpirun has started 2 already")) == (MISTAKE, 1)


@pytest.mark.skipif(pinning.count_gpus() > 0, reason="this host has a GPU")
def test_a_run_for_gpus_is_refused_once(images, tmp_path, capsys):
    large = ("--recipe", "volo_d1", "--batch-size", "20", "--img-size", "512")
    done = run(command(images, tmp_path, *large))
    assert (done.returncode, done.stdout.count("\n")) == (MISTAKE, 1), done.stdout
    assert "for GPUs, but torch sees none: " in done.stdout
    assert not (tmp_path / "run").exists()
    alone = [str(images), *large, "--output", str(tmp_path), "--resume", "nowhere", "--device"]
    for device, text in (("auto", "for GPUs"), ("cuda", "torch sees none"), ("cpu", "nowhere")):
        assert main([*alone, device]) == MISTAKE
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "gpus"), [(None, 4), ("", 0), ("2,0", 2), ("GPU-b", 1), ("9", 0), ("MIG-x", 1)]
)
def test_auto_is_a_rank_for_each_visible_gpu(monkeypatch, setting, gpus):
    listed = [(f"00000000:{number:02}:00.0", f"GPU-{name}") for number, name in enumerate("abcd")]
    monkeypatch.setattr(pinning.topology, "list_gpus", lambda: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert (pinning.count_gpus(), resolve_ranks(AUTO)) == (gpus, max(1, gpus))
    told = f"1 of {gpus} GPUs: --ranks auto uses all" if gpus > 1 else ""
    assert (unused_gpus(World()), unused_gpus(World(launcher="srun"))) == (told, "")
