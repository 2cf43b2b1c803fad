"""Every command but training ends on SIGINT and SIGTERM with one line, its status, and nothing unfinished."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from horovod_volo.models.build import build_model
from tests.ranks.launching import launcher, python, run, started, wait_until

SECONDS = 90
SECONDS_TO_VANISH = 2  # a process that ended is listed until the kernel has freed its memory
MODEL = ("--model", "volo_demo", "--img-size", "64")


@pytest.fixture(scope="module")
def folder(demo_images: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a demo set of many equal images, weights, and a set of large images."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(demo_images(40, 20), folder / "demo")
    for image in list((folder / "demo" / "train").glob("*/*.jpg")):
        for copy in range(100):
            os.link(image, image.with_stem(f"{image.stem}_{copy}"))
    network = build_model("volo_demo", img_size=64, num_classes=10, drop_path=0.0)
    torch.save(network.state_dict(), folder / "weights.pt")
    for split in ("train", "val"):
        (folder / "large" / split / "a").mkdir(parents=True)
        for number in range(20 if split == "train" else 2):
            file = folder / "large" / split / "a" / f"{number:02}.png"
            Image.effect_noise((1500, 1500), 80).save(file, compress_level=1)
    return folder


def test_the_end_of_a_command_waits_for_all_that_is_under_way():
    """Also where it is Python's own, for a profiler's sake."""
    program = """import atexit, threading, time
from horovod_volo.cluster.stop_signals import exit_at_once
threading.Thread(target=lambda: time.sleep(0.3) or print("thread")).start()
atexit.register(print, "registered")
print("main")
exit_at_once(3)"""
    for variables in ({}, {"CUDA_INJECTION64_PATH": "profiler.so"}):
        done = run([sys.executable, "-c", program], **variables)
        assert (done.returncode, done.stdout.split()) == (3, ["main", "thread", "registered"])


def test_a_command_is_interrupted_again_if_it_goes_on_but_not_while_it_cleans_up():
    for block in ("except: pass\n    print(time.sleep(0.5))", "finally: print(time.sleep(1.5))"):
        program = f"""import os, signal, time
from horovod_volo.cluster.stop_signals import run_until_signal
def main(_):
    try: os.kill(os.getpid(), signal.SIGINT)
    {block}
run_until_signal(main, "stopped")"""
        done = run([sys.executable, "-c", program])
        assert (done.returncode, done.stdout) == (130, "SIGINT: stopped\n" + "None\n" * ("finally" in block))


def stop(
    arguments: list[object], number: signal.Signals, ready: Callable[[], object], *, to_all: bool = True
) -> tuple[int, list[str], float]:
    """Start a command, signal its processes, as Ctrl-C does; return status, lines and how long it ended."""
    command = [*python(plain=True), "-m", *map(str, arguments)]
    with started(command) as process:
        limit = time.monotonic() + SECONDS
        while not ready():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < limit
            time.sleep(0.02)
        began = time.monotonic()
        (os.killpg if to_all else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=SECONDS)
        seconds = time.monotonic() - began
        wait_until(lambda: not in_session(process.pid), SECONDS_TO_VANISH, "all processes to end", pause=0.02)
    return process.returncode, output.splitlines(), seconds


def in_session(leader: int) -> list[str]:
    """Return the processes of a session that have not ended."""
    listed = subprocess.run(["ps", "-o", "stat=,args=", "-s", str(leader)], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if not line.startswith("Z")]


def partials(folder: Path) -> list[Path]:
    return list(folder.rglob("*.partial")) if folder.exists() else []


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_pack_ends_with_its_workers_and_resumes(folder, tmp_path, number, to_all):
    out = tmp_path / "out"
    arguments = ["horovod_volo.pack", folder / "large", out, "--resize", "1200", "--workers", "2"]
    arguments += ["--shard-images", "5"]
    status, lines, seconds = stop(
        arguments, number, lambda: len(partials(out / "train.packing")) == 2, to_all=to_all
    )
    assert status == 128 + number
    assert lines[-1] == (
        f"{number.name}: stopped; finished shards are kept, and the same command packs the others"
    )
    assert [line for line in lines if "images of train" not in line] == lines[-1:]
    assert seconds < 3
    assert partials(out) == []
    if to_all:
        done = run([*python(), "-m", *map(str, arguments)])
        assert done.returncode == 0, done.stdout


def test_workers_that_are_starting_print_nothing(folder, tmp_path):
    out = tmp_path / "out"
    arguments = ["horovod_volo.pack", folder / "large", out, "--workers", "2", "--shard-images", "10"]
    plan = out / ".packing" / "train.plan.json"
    status, lines, _ = stop(arguments, signal.SIGINT, lambda: plan.exists() and not time.sleep(0.1))
    assert status == 130
    assert [line for line in lines if "images of train" not in line] == lines[-1:]


EVALUATE = ["evaluate", "{folder}/demo", "--weights", "{folder}/weights.pt", *MODEL, "--split", "train"]
EVALUATE += ["--batch-size", "1", "--json", "{out}/result.json"]
DOCTOR = ["doctor", "--shared", "{out}/runs"]


@pytest.mark.parametrize(
    ("command", "number", "delay", "text"),
    [  # at any time, also while torch is being imported
        (EVALUATE, signal.SIGTERM, 6.0, "the evaluation is stopped, and wrote no result"),
        (DOCTOR, signal.SIGINT, 2.0, "the doctor is stopped, without a report"),
    ],
)
def test_a_command_ends_with_one_line(folder, tmp_path, command, number, delay, text):
    ready = time.monotonic() + delay
    name, *flags = (word.format(folder=folder, out=tmp_path) for word in command)
    status, lines, seconds = stop([f"horovod_volo.{name}", *flags], number, lambda: time.monotonic() > ready)
    assert status == 128 + number, lines
    assert [line for line in lines if "/4,040 images" not in line] == [f"{number.name}: {text}"]
    assert seconds < 5
    assert list(tmp_path.iterdir()) == []


def test_an_export_leaves_nothing(folder, tmp_path):
    arguments = ["horovod_volo.export", folder / "weights.pt", tmp_path / "out", *MODEL, "--onnx"]
    status, lines, _ = stop(arguments, signal.SIGINT, lambda: partials(tmp_path))
    assert status == 130
    # In whatever order: only a terminal, or PYTHONUNBUFFERED, writes the standard output line by line.
    assert lines.count("SIGINT: the export is stopped, and wrote nothing") == 1
    assert not [line for line in lines if "Traceback" in line]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("start_with", [pytest.param("gloo", marks=pytest.mark.soak), "mpi"])
def test_ranks_print_one_line(folder, start_with):
    """Rank 1 never joins, so that rank 0 waits for it inside Horovod; or both are at work."""
    evaluate = ["-m", "horovod_volo.evaluate", str(folder / "demo"), "--weights", str(folder / "weights.pt")]
    evaluate += ["--model", "volo_demo", "--img-size", "320"]  # 4,040 such images take minutes
    evaluate += ["--split", "train", "--batch-size", "1", "--catalog-dir", str(folder / "catalogs")]
    command = shlex.join([*python(), *evaluate])
    rank = "${HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}"
    for absent in ("", f"[ {rank} = 0 ] || exec sleep 20; "):
        # Each rank is sent the signal, as launchers do.
        script = f"{absent}{command} & sleep 5; kill -TERM $!; wait $!; echo status $? of rank {rank}"
        done = run([*launcher(start_with, 2), "bash", "-c", script], seconds=SECONDS)
        text = "SIGTERM on rank 0: the evaluation is stopped, and wrote no result"
        assert done.stdout.count(text) == done.stdout.count("is stopped") == 1, done.stdout
        assert "status 143 of rank 0" in done.stdout
        assert "Traceback" not in done.stdout
