"""Every command of the README runs, those for a cluster at a small size.

Commands that one machine without a GPU can run are unchanged. In commands for a cluster the hosts, the number
of ranks and the paths are replaced, and flags that shorten the run are added.
"""

import contextlib
import json
import re
import shlex
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, nearest_batches, resolve
from horovod_volo.config.validation import config_warnings
from tests.ranks.forking import path_of_forks
from tests.ranks.launching import environment, run

ROOT = Path(__file__).parents[2]
SHORT = (
    "--model volo_demo --img-size 32 --epochs 1 --warmup-epochs 0 --cooldown-epochs 0 "
    "--drop-path 0 --log-every 1"
)


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def needs_cluster(command: str) -> bool:
    return "/path/to/imagenet" in command


DOCTOR = "horovodrun -np 2 python -m horovod_volo.doctor"


def shell(command: str, *, seconds: int, **extra: str) -> subprocess.CompletedProcess[str]:
    return run(["bash", "-c", f"cd {shlex.quote(str(ROOT))} && {command}"], seconds=seconds, **extra)


def test_every_command_of_the_readme_is_tested_here():
    tested = {
        DOCTOR,
        "./tools/demo",
        "./tools/test",
        "./tools/setup",  # which the two before run first
        "source tools/activate",
        "tensorboard --logdir runs",
    }
    # tests/smoke/test_tutorial.py runs the others.
    others = {command for command in commands() if command.startswith("horovod-volo ")}
    assert {command for command in commands() if not needs_cluster(command)} == tested | others


def test_the_doctor_reports_no_failure():
    done = shell(f"source tools/activate && {DOCTOR}", seconds=120)
    assert done.returncode == 0, done.stdout
    assert "0 failures, " in done.stdout


def test_tools_demo_trains_and_tensorboard_shows_the_run(request):
    """Trains half of the demo's epochs, with --long all of them, in a run folder of its own."""
    flags, least = ("", 90.0) if request.config.getoption("--long") else (" --epochs 5", 60.0)
    done = shell(f"./tools/demo{flags}", seconds=1500, DEMO_NAME="readme_test")
    assert done.returncode == 0, done.stdout
    accuracy = re.search(r"Held-out top-1 .*: ([\d.]+) %", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) >= least
    assert "tensorboard --logdir runs" in done.stdout.splitlines()[-1]
    scalars = tensorboard_scalars(ROOT / "runs")
    assert {"train/loss", "train/lr", "evaluation/top1"} <= set(scalars["readme_test"])


def tensorboard_scalars(folder: Path) -> dict[str, dict[str, object]]:
    """Return the scalar tags of each run that a TensorBoard server lists."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [".venv/bin/tensorboard", "--logdir", str(folder), "--port", str(port), "--load_fast=false"]
    # TensorBoard's own imports warn; warnings are errors in this project's processes only.
    started = environment(PYTHONWARNINGS="")
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=started) as server:
        try:
            return _fetch_tags(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", seconds=90)
        finally:
            server.terminate()


def _fetch_tags(address: str, seconds: float) -> dict[str, dict[str, object]]:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as page:
            found = json.loads(page.read())
            if "readme_test" in found:
                return found
        time.sleep(0.5)
    raise AssertionError("TensorBoard did not show the run")


def test_tools_test_checks_the_code_and_runs_tests():
    done = shell("./tools/test -q tests/unit/test_config_derived.py", seconds=600)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.parametrize("command", [command for command in commands() if needs_cluster(command)])
def test_a_cluster_command_has_all_inputs_of_the_published_run(command):
    words = shlex.split(command)
    ranks = int(words[words.index("--ranks" if "--dry-run" in words else "-np") + 1])
    config = parse(words[words.index("horovod_volo.train") + 1 :]).config
    assert config.published.needs
    assert config_warnings(config) == []
    batch = derive(resolve(config, ranks), ranks=ranks, images=1_281_167).global_batch
    assert batch in nearest_batches(config.update.lr_base_size, ranks)


@pytest.mark.parametrize("command", [command for command in commands() if needs_cluster(command)])
def test_a_cluster_command_runs_at_a_small_size(command, demo_set, tmp_path):
    small = re.sub(r" -np \d+", " -np 2", command)
    small = re.sub(r" -H \S+", "", small)
    small = small.replace("/path/to/imagenet", str(demo_set))
    small = small.replace("/path/to/token_label_data", str(demo_set / "token_labels"))
    batch = 1 if "--dry-run" in command else 4  # the dry run has 40 ranks and 40 images
    flags = f"{SHORT} --batch-size {batch} --output {tmp_path} --name run"
    if "--global-batch" in command:
        flags += f" --global-batch {40 if '--dry-run' in command else 8}"
    forks = shlex.quote(path_of_forks())
    done = shell(f"source tools/activate && PATH={forks} && {small} {flags}", seconds=300)
    assert done.returncode == 0, done.stdout
    if "--dry-run" in command:
        assert "40 images per step = 40 ranks x 1 images x 1 micro-batches" in done.stdout
        assert not list(tmp_path.iterdir())
    else:
        assert "done: " in done.stdout
        assert (tmp_path / "run" / "checkpoints" / "last" / "model.safetensors").is_file()
