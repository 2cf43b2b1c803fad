"""What goes wrong while ranks train: said once, by the rank that knows, and soon over."""

import json
import signal
import subprocess
import sys
import time

import pytest

from horovod_volo.data.demo_set import make_demo_set
from tests.ranks.launching import environment, train

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "2", "--warmup-epochs", "0")


@pytest.fixture
def images(tmp_path):
    make_demo_set(tmp_path / "set", train=40, val=20)
    return tmp_path / "set"


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_a_damaged_image_is_named(images, tmp_path, start_with):
    victim = sorted((images / "train" / "ring").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:300])
    began = time.monotonic()
    done = train(str(images), *SMALL, "--output", str(tmp_path / "runs"), ranks=2, start_with=start_with)
    assert done.returncode not in (0, 75)
    assert time.monotonic() - began < 60
    messages = [line for line in done.stdout.splitlines() if "error on rank" in line]
    assert len(messages) == 1
    assert victim.name in messages[0]
    assert "horovod_volo" not in done.stdout.replace(messages[0], ""), (
        "a traceback of ours beside the message"
    )


def test_a_missing_label_map_is_named(images, tmp_path):
    victim = sorted((images / "token_labels" / "star").iterdir())[-1]
    victim.unlink()
    labels = ("--token-label-data", str(images / "token_labels"))
    done = train(str(images), *SMALL, *labels, "--output", str(tmp_path / "runs"), ranks=2, start_with="gloo")
    assert done.returncode not in (0, 75)
    assert str(victim) in done.stdout


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_goes_on_later(images, tmp_path, number):
    words = [
        sys.executable,
        "-m",
        "horovod_volo.train",
        str(images),
        *SMALL,
        "--output",
        str(tmp_path / "runs"),
    ]
    words += ["--epochs", "400", "--eval-every", "400", "--log-every", "1", "--name", "run"]
    folder = tmp_path / "runs" / "run"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            _wait_for_a_line(folder / "metrics.jsonl")
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75, output
    step = json.loads((folder / "checkpoints" / "last" / "state.json").read_text())["step"]
    assert f"stopped at step {step} and saved" in output
    further = ("--resume", "auto", "--stop-at-step", str(step + 2))
    resumed = train(*words[3:], *further, ranks=1, start_with="none")
    assert resumed.returncode == 75, resumed.stdout
    assert f"at step {step}:" in resumed.stdout


def _wait_for_a_line(path, seconds=60.0):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if path.exists() and path.read_text().count("\n"):
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} stayed empty")
