"""A fault during training is reported once, by the rank on which it occurs, and ends the run quickly."""

import json
import os
import shlex
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import environment, launcher, python, run, train

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "2", "--warmup-epochs", "0")


@pytest.fixture
def images(tmp_path):
    make_demo_set(tmp_path / "set", train=40, val=20)
    return tmp_path / "set"


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_a_damaged_image_is_named(images, tmp_path, start_with):
    damaged = sorted((images / "train" / "ring").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:300])
    began = time.monotonic()
    strict = (*SMALL, "--bad-samples", "fail", "--output", str(tmp_path / "runs"))
    done = train(str(images), *strict, ranks=2, start_with=start_with)
    assert done.returncode not in (0, 75)
    assert time.monotonic() - began < 60
    messages = [line for line in done.stdout.splitlines() if "error on rank" in line]
    assert len(messages) == 1
    assert damaged.name in messages[0]
    assert "horovod_volo" not in done.stdout.replace(messages[0], ""), (
        "there is a traceback of the package besides the message"
    )


def test_a_missing_label_map_is_named(images, tmp_path):
    missing = sorted((images / "token_labels" / "star").iterdir())[-1]
    missing.unlink()
    labels = ("--token-label-data", str(images / "token_labels"))
    strict = (*SMALL, *labels, "--bad-samples", "fail", "--output", str(tmp_path / "runs"))
    done = train(str(images), *strict, ranks=2, start_with="gloo")
    assert done.returncode not in (0, 75)
    assert str(missing) in done.stdout


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_bad_samples_are_skipped_named_once_and_counted(images, tmp_path, start_with):
    """A truncated image, a missing label map and an empty validation image are skipped in all steps."""
    maps = images / "token_labels"
    truncated, _, unlabelled = sorted((images / "train" / "ring").iterdir())[:3]
    truncated.write_bytes(truncated.read_bytes()[:300])
    (maps / "ring" / unlabelled.name).with_suffix(".pt").unlink()
    held_out = sorted((images / "val" / "star").iterdir())[0]
    held_out.write_bytes(b"")
    folder = tmp_path / "runs" / "run"
    arguments = (*SMALL, "--token-label-data", str(maps), "--log-every", "1", "--output", str(folder.parent))
    done = train(str(images), *arguments, "--name", "run", ranks=2, start_with=start_with)
    assert done.returncode == 0, done.stdout
    log = (folder / "log.txt").read_text()
    for name in (truncated.name, unlabelled.stem, held_out.name):
        assert len([line for line in log.splitlines() if "left out" in line and name in line]) == 1
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record and "lr" in record]
    assert [record["step"] for record in steps] == list(range(1, 11))  # 40 images, 8 per step, two epochs
    assert steps[-1]["bad_samples"] == 4  # two in each of the two epochs
    assert [record for record in records if "top1" in record][-1]["bad_samples"] == 1
    assert [record for record in records if "top1" in record][-1]["images"] == 19


STOPS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_stop_signal_saves_and_the_run_resumes(images, tmp_path, number):
    """The first log point is far away: ranks agree to stop at the end of a step."""
    command = [*python(), "-m", "horovod_volo.train", str(images), *SMALL, "--output", str(tmp_path / "runs")]
    command += ["--epochs", "400", "--eval-every", "400", "--log-every", "1000", "--name", "run"]
    command += ["--checkpoint-every", "1"]
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        try:
            _wait_for(checkpoints / "last")
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75, output
    step = json.loads((checkpoints / "last" / "state.json").read_text())["step"]
    assert f"{number.name} on rank 0: the run saves a checkpoint after this step and stops" in output
    assert f"stopped at step {step} and saved" in output
    further = ("--resume", "auto", "--stop-at-step", str(step + 2))
    resumed = train(*command[command.index(str(images)) :], *further, ranks=1, start_with="none")
    assert resumed.returncode == 75, resumed.stdout
    assert f"stopped at step {step + 2} and saved" in resumed.stdout


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_a_stop_signal_to_one_rank_stops_all_at_the_end_of_the_step(images, tmp_path, start_with):
    arguments = (
        *SMALL,
        "--output",
        str(tmp_path),
        "--name",
        "run",
        "--log-every",
        "1000",
        "--eval-every",
        "2",
    )
    fault = {"INJECTED_FAULT": "1:3:SIGTERM", "ranks": 2, "start_with": start_with}
    done = train(str(images), *arguments, "--plugin", "tests.faults.injected", **fault)
    assert done.returncode != 0
    assert "stopped at step 4 and saved" in done.stdout, done.stdout
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000004"]


def test_early_and_repeated_stop_signals_stop_once(images, tmp_path):
    command = [
        *python(plain=True),
        "-m",
        "horovod_volo.train",
        str(images),
        *SMALL,
        "--output",
        str(tmp_path),
    ]
    command += ["--epochs", "400", "--eval-every", "400", "--log-every", "2", "--name", "run"]
    blocked = ["env", "--block-signal=USR1", *command]  # as the scripts in jobs/ start ranks
    with subprocess.Popen(blocked, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            limit = time.monotonic() + 90
            time.sleep(0.05)  # env has blocked the signal, and Python has not started
            while process.poll() is None and time.monotonic() < limit:
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.02)
            output = process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == 75, output
    assert "stopped at step 1 and saved" in output


def test_no_rank_exits_before_the_last_one_has_closed_its_loggers(images, tmp_path):
    """horovodrun kills all ranks when one exits with status 75."""
    arguments = (str(images), *SMALL, "--output", str(tmp_path), "--name", "run", "--stop-at-step", "2")
    fault = {"INJECTED_FAULT": "0:0:slow-close", "ranks": 2, "start_with": "gloo"}
    done = train(*arguments, "--plugin", "tests.faults.injected", **fault)
    assert "stopped at step 2 and saved" in done.stdout
    assert "Exit code: 75" in done.stdout, done.stdout
    assert not (tmp_path / "run" / "lock.json").exists()


def _wait_for(path, seconds=60.0):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} does not exist yet")


def test_a_state_that_is_not_finite_replaces_no_checkpoint(images, tmp_path):
    """The loss is not finite after one step with such a rate; neither is that after a return."""
    arguments = (str(images), *SMALL, "--output", str(tmp_path), "--name", "run", "--checkpoint-every", "1")
    arguments = (*arguments, "--log-every", "50", "--keep-checkpoints", "3")
    first = train(*arguments, "--stop-at-step", "3", ranks=2, start_with="gloo")
    assert "stopped at step 3" in first.stdout
    done = train(*arguments, "--resume", "auto", "--lr", "1e38", ranks=2, start_with="gloo")
    assert done.returncode not in (0, 75), done.stdout
    errors = [line for line in done.stdout.splitlines() if "error" in line and "finite" in line]
    assert len(errors) == 1, done.stdout
    assert "--lr" in errors[0]
    assert "--warmup-epochs" in errors[0]
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert len(saved) == 3
    for checkpoint in saved:
        for file in checkpoint.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                assert tensor.isfinite().all(), (checkpoint.name, name)


def test_an_evaluation_that_cannot_be_written_is_one_error(images, tmp_path):
    (tmp_path / "run" / "checkpoints" / "best").mkdir(parents=True)  # a folder in place of the link
    began = time.monotonic()
    arguments = (str(images), *SMALL, "--output", str(tmp_path), "--name", "run")
    done = train(*arguments, ranks=2, start_with="gloo")
    assert done.returncode not in (0, 75)
    assert time.monotonic() - began < 60
    errors = [line for line in done.stdout.splitlines() if "error" in line and "evaluation" in line]
    assert len(errors) == 1, done.stdout
    assert "horovod_volo/" not in done.stdout, "there is a traceback of the package besides the message"
    assert (tmp_path / "run" / "checkpoints" / "step_00000005" / "state.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of its own needs root")
def test_a_host_whose_name_has_no_address_is_named(images, tmp_path):
    """Gloo would end in a segmentation fault."""
    arguments = (str(images), *SMALL, "--output", str(tmp_path))
    command = [
        *launcher("gloo", 2, plain=True),
        *python(plain=True),
        "-m",
        "horovod_volo.train",
        *arguments,
    ]
    renamed = ["unshare", "--uts", "bash", "-c", f"hostname nosuchhost; exec {shlex.join(command)}"]
    done = run(renamed, seconds=60)
    assert done.returncode not in (0, 75)
    assert "The name of this host, nosuchhost, has no address, and gloo needs one." in done.stdout
    assert "139" not in done.stdout


def test_files_keep_the_umask(images, tmp_path):
    arguments = (str(images), *SMALL, "--epochs", "1", "--output", str(tmp_path / "runs"), "--name", "run")
    command = shlex.join([*python(), "-m", "horovod_volo.train", *arguments])
    done = run(["sh", "-c", f"umask 077; exec {command}"])
    assert done.returncode == 0, done.stdout
    files = [path for path in (tmp_path / "runs").rglob("*") if not path.is_symlink()]
    assert len(files) > 10
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []
