"""A fault during training is reported once, by its rank, and ends the run quickly; names are escaped."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from importlib import import_module
from pathlib import Path

import pytest

from horovod_volo import train
from horovod_volo.cluster.launch_env import ALONE
from horovod_volo.doctor.report import build_report, format_report, warning
from tests.ranks.launching import launcher, python, run, started, wait_until
from tests.runs import FAILED, SMALL, STOPPED, assert_finite, only_error, records, start, steps


def test_bad_samples_are_skipped_named_once_and_counted(demo_images, tmp_path):
    """A truncated image, a missing label map and an empty validation image are skipped in all steps."""
    damaged_set = shutil.copytree(demo_images(40, 20), tmp_path / "set")
    maps = damaged_set / "token_labels"
    truncated, _, unlabelled = sorted((damaged_set / "train" / "ring").iterdir())[:3]
    truncated.write_bytes(truncated.read_bytes()[:300])
    (maps / "ring" / unlabelled.name).with_suffix(".pt").unlink()
    held_out = min((damaged_set / "val" / "star").iterdir())
    held_out.write_bytes(b"")
    start(damaged_set, tmp_path, "--epochs", "2", "--token-label-data", str(maps), "--log-every", "1")
    log = (tmp_path / "run" / "log.txt").read_text()
    for name in (truncated.name, unlabelled.stem, held_out.name):
        assert len([line for line in log.splitlines() if "left out" in line and name in line]) == 1
    assert steps(tmp_path) == list(range(1, 11))  # 40 images, 8 per step, two epochs
    assert records(tmp_path, "lr")[-1]["bad_samples"] == 4  # two in each of the two epochs
    evaluation = records(tmp_path, "top1")[-1]
    assert (evaluation["bad_samples"], evaluation["images"]) == (1, 19)


def training(images: Path, output: Path, *flags: str, plain: bool = False) -> list[str]:
    """Return the command of a run of one rank that lasts longer than a test waits."""
    command = [*python(plain=plain), "-m", "horovod_volo.train", str(images), *SMALL, "--name", "run"]
    return [*command, "--output", str(output), "--epochs", "400", "--eval-every", "400", *flags]


def test_a_stop_signal_saves_and_the_run_resumes(images, tmp_path):
    """The first log point is far away: ranks agree to stop at the end of a step."""
    command = training(images, tmp_path, "--log-every", "1000", "--checkpoint-every", "1")
    last = tmp_path / "run" / "checkpoints" / "last"
    with started(command) as process:
        wait_until(last.exists, 60, "a checkpoint")
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, output
    step = json.loads((last / "state.json").read_text())["step"]
    assert "SIGHUP on rank 0: the run saves a checkpoint after this step and stops" in output
    assert f"stopped at step {step} and saved" in output
    resumed = run([*command, "--resume", "auto", "--stop-at-step", str(step + 2)])
    assert resumed.returncode == STOPPED, resumed.stdout
    assert f"stopped at step {step + 2} and saved" in resumed.stdout


def test_a_stop_signal_to_one_rank_stops_all_at_the_end_of_the_step(images, tmp_path):
    settings = {"fault": "1:3:SIGTERM", "start_with": "mpi", "status": STOPPED}
    shown = start(images, tmp_path, "--log-every", "1000", **settings)
    assert "stopped at step 4 and saved" in shown, shown
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000004"]


def test_early_and_repeated_stop_signals_stop_once(images, tmp_path):
    command = training(images, tmp_path, "--log-every", "2", plain=True)
    # As the scripts in jobs/ start ranks.
    with started(["jobs/block_signals", "USR1", *command]) as process:
        limit = time.monotonic() + 90
        line = Path(f"/proc/{process.pid}/cmdline")
        wait_until(lambda: line.read_bytes().startswith(command[0].encode()), 20, "the trainer")
        while process.poll() is None and time.monotonic() < limit:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.02)
        output, _ = process.communicate(timeout=5)
    assert process.returncode == STOPPED, output
    assert "stopped at step 1 and saved" in output


def test_no_rank_exits_before_the_last_one_has_closed_its_loggers(images, tmp_path):
    """horovodrun kills all ranks when one exits with status 75."""
    shown = start(images, tmp_path, fault="0:0:slow-close", stop_at=2)
    assert "Exit code: 75" in shown, shown
    assert not (tmp_path / "run" / "lock.json").exists()


def test_a_state_that_is_not_finite_replaces_no_checkpoint(images, tmp_path):
    """The loss is not finite after one step with such a rate; neither is that after a return."""
    flags = ("--checkpoint-every", "1", "--log-every", "50", "--keep-checkpoints", "3")
    start(images, tmp_path, *flags, stop_at=3)
    shown = start(images, tmp_path, *flags, "--resume", "auto", "--lr", "1e38", status=FAILED)
    error = only_error(shown, "finite")
    assert "--lr" in error
    assert "--warmup-epochs" in error
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert len(saved) == 3
    for checkpoint in saved:
        assert_finite(tmp_path, checkpoint.name)


def test_an_evaluation_that_cannot_be_written_is_one_error(images, tmp_path):
    (tmp_path / "run" / "checkpoints" / "best").mkdir(parents=True)  # a folder in place of the link
    shown = start(images, tmp_path, status=FAILED, seconds=60)
    assert only_error(shown, "evaluation")
    assert str(Path(train.__file__).parent) not in shown, "there is a traceback of the package"
    assert (tmp_path / "run" / "checkpoints" / "step_00000010" / "state.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of its own needs root")
def test_a_host_whose_name_has_no_address_is_named(images, tmp_path):
    """Gloo would end in a segmentation fault."""
    command = [*launcher("gloo", 2, plain=True), *training(images, tmp_path, plain=True)]
    renamed = ["unshare", "--uts", "bash", "-c", f"hostname nosuchhost; exec {shlex.join(command)}"]
    done = run(renamed, seconds=60)
    assert done.returncode not in (0, STOPPED)
    assert "The name of this host, nosuchhost, has no address, and gloo needs one." in done.stdout
    assert "139" not in done.stdout


def test_files_keep_the_umask(images, tmp_path):
    command = shlex.join([*training(images, tmp_path / "runs"), "--epochs", "1"])
    done = run(["sh", "-c", f"umask 077; exec {command}"])
    assert done.returncode == 0, done.stdout
    files = [path for path in (tmp_path / "runs").rglob("*") if not path.is_symlink()]
    assert len(files) > 10
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []


NAME, ESCAPED = "a\x1b[31mb\nc\x9b", r"a\x1b[31mb\nc\x9b"


@pytest.fixture
def misnamed(demo_images, tmp_path: Path) -> Path:
    """Copy a demo set; name a class so, and a damaged image in it, whose name is not UTF-8 either."""
    folder = shutil.copytree(demo_images(40, 20), tmp_path / "set")
    for split in ("train", "val"):
        (folder / split / "ring").rename(folder / split / NAME)
        first = min((folder / split / NAME).iterdir())
        damaged = first.with_name(f"{NAME}{os.fsdecode(bytes([0xFF]))}.jpg")
        damaged.write_bytes(first.read_bytes()[:300])
        first.unlink()
    return folder


def assert_printable(text: str) -> None:
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    assert "\x9b" not in text


def test_a_run_logs_them_escaped(misnamed, tmp_path):
    shown = start(misnamed, tmp_path, ranks=1)
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    for text in (shown, log):
        assert_printable(text)
        left_out = [line for line in text.splitlines() if "left out: " in line]
        assert len(left_out) == 2
        assert all(f"{ESCAPED}/{ESCAPED}\\udcff.jpg" in line for line in left_out)


def test_an_error_of_ranks_about_a_damaged_image_is_one_line(misnamed, tmp_path):
    settings = {"start_with": "mpi", "status": FAILED, "seconds": 60}
    shown = start(misnamed, tmp_path, "--bad-samples", "fail", **settings)
    assert_printable(shown)
    error = only_error(shown, ESCAPED)
    assert "horovod_volo" not in shown.replace(error, ""), "there is a traceback of the package"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("pack", ["{set}", "{out}"]),
        ("pack", ["{missing}", "{out}"]),
        ("labels", ["verify", "{missing}"]),
        ("export", ["{missing}", "{out}"]),
        ("evaluate", ["{missing}", "--weights", "{missing}"]),
        ("train", ["{set}", "--recipe", "{missing}"]),
    ],
)
def test_other_commands_escape_them(misnamed, tmp_path, capfd, command, arguments):
    places = {"set": misnamed, "missing": tmp_path / NAME, "out": tmp_path / "out"}
    main = import_module(f"horovod_volo.{command}").main
    assert main([word.format(**places) for word in arguments]) in (1, 2)
    shown = "".join(capfd.readouterr())
    assert ESCAPED in shown
    assert_printable(shown)


def test_the_report_of_the_doctor_escapes_them():
    found = warning(f"{NAME} is slow", f"Rename {NAME}.")
    text = format_report(build_report(ALONE, [[found]], ["host"], "none"))
    assert_printable(text)
    assert text.count(ESCAPED) == 2


HOST = Path("/proc/sys/kernel/hostname").read_text().strip()
TRAIN, SEEDS = ("horovod_volo.train", *SMALL), f"--seed is 42 on rank 0 ({HOST}) and 7 on rank 1 ({HOST})"


@pytest.mark.parametrize(
    ("entry", "start_with", "on_rank_1", "messages"),
    [
        (TRAIN, "gloo", "--seed 7 --hflip 0", (SEEDS, "--hflip is 0.5 on")),
        (TRAIN, "mpi", "--epochs ten", ("--epochs takes a whole number", "(seen on rank 1 of 2)")),
        (("horovod_volo.evaluate", "--weights", "nowhere"), "mpi", "--batch-size 5", ("--batch-size is",)),
    ],
)
def test_what_differs_is_named(images, tmp_path, entry, start_with, on_rank_1, messages):
    module, *flags = entry
    where = ["--output", str(tmp_path / "runs")] if entry is TRAIN else []
    command = shlex.join([*python(), "-m", module, str(images), *flags, *where])
    rank = "${HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}"
    script = f"if [ {rank} = 1 ]; then set -- {on_rank_1}; fi; exec {command} $*"
    done = run([*launcher(start_with, 2), "bash", "-c", script], seconds=30)
    assert done.returncode not in (0, 75)
    error = only_error(done.stdout)
    assert all(message in error for message in messages), error
    assert not (tmp_path / "runs").exists()
