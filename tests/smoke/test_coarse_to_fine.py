"""jobs/coarse_to_fine, stopped in either stage, resumes and gives bit-identical weights."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ranks.forking import path_of_forks
from tests.ranks.launching import environment, run, wait_until
from tests.runs import STOPPED, assert_same_tensors
from tests.smoke.conftest import files_under

SCRIPT = str(Path(__file__).parents[2] / "jobs" / "coarse_to_fine")
STEPS = 10  # of each stage: one epoch of 40 images, 4 per step
SHORT = ("--epochs", "1", "--warmup-epochs", "0", "--drop-path", "0.2", "--log-every", "1", "--mix-token")
COARSE, FINE = ("--coarse", "--img-size", "32"), ("--fine", "--img-size", "64", "--lr", "1e-3")
GLOO = "horovodrun -np 2 --gloo"


def command_of(images: Path, output: Path, batch: int) -> list[str]:
    place = ("--output", str(output), "--name", "chain")
    return [SCRIPT, str(images), "demo", "demo", *SHORT, *place, "--batch-size", str(batch)]


def chain(
    images: Path, output: Path, *, coarse: tuple[str, ...] = (), fine: tuple[str, ...] = (), launch: str = ""
) -> subprocess.CompletedProcess[str]:
    batch = 2 if launch else 4
    return run(
        [*command_of(images, output, batch), *COARSE, *coarse, *FINE, *fine],
        seconds=240,
        LAUNCH=f"env PATH={path_of_forks()} {launch}",
    )


def log_of(output: Path, stage: str) -> str:
    file = output / "chain" / stage / "log.txt"
    return file.read_text(encoding="utf-8") if file.exists() else ""


@pytest.fixture(scope="module")
def uninterrupted(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("uninterrupted")
    done = chain(images, output)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"done: {STEPS} steps") == 2
    assert "Both stages are finished" in done.stdout.splitlines()[-1]
    return output


def test_a_chain_that_is_stopped_in_both_stages_gives_the_same_weights(images, uninterrupted, tmp_path):
    first = chain(images, tmp_path, coarse=("--stop-at-step", "3"))
    assert first.returncode == STOPPED, first.stdout
    assert not (tmp_path / "chain" / "fine").exists()

    # A failure is not reported as a stop, although the log contains an earlier stop.
    refused = chain(images, tmp_path, coarse=("--seed", "7"))
    assert refused.returncode == 2
    assert "has seed 42, this run has 7" in refused.stdout

    second = chain(images, tmp_path, fine=("--stop-at-step", "4"))
    assert second.returncode == STOPPED, second.stdout
    assert "resumed  at step 3: epoch 0" in log_of(tmp_path, "coarse")
    assert f"weights from {tmp_path}/chain/coarse" in log_of(tmp_path, "fine")

    third = chain(images, tmp_path)
    assert third.returncode == 0, third.stdout
    assert "resumed  at step 4: epoch 0" in log_of(tmp_path, "fine")
    assert log_of(tmp_path, "coarse").count("done: ") == 1
    for stage in ("coarse", "fine"):
        weights = Path("chain", stage, "checkpoints/last/model.safetensors")
        assert_same_tensors(load_file(uninterrupted / weights), load_file(tmp_path / weights))


def test_a_finished_chain_ends_at_once(images: Path, uninterrupted: Path) -> None:
    before = files_under(uninterrupted)
    began = time.monotonic()
    again = chain(images, uninterrupted)
    assert again.returncode == 0
    assert again.stdout.splitlines() == [
        f"Both stages are finished; the best weights are in {uninterrupted}/chain/fine/checkpoints/best"
    ]
    assert time.monotonic() - began < 5
    assert files_under(uninterrupted) == before


def test_a_launcher_that_returns_0_before_the_end_is_an_error(images: Path, tmp_path: Path) -> None:
    """mpirun may return 0 when it has lost a host."""
    done = chain(images, tmp_path, launch="true")
    assert done.returncode == 1, done.stdout
    assert "ended before training was finished" in done.stdout
    assert not list(tmp_path.rglob("finished"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])  # as by Ctrl-C
def test_a_signal_to_the_script_reaches_the_ranks(images: Path, tmp_path: Path, number: int) -> None:
    """After two of many epochs; the script returns the status of the ranks, where horovodrun returns 1."""
    command = [*command_of(images, tmp_path, 2), *COARSE, "--epochs", "500", *FINE]
    with (tmp_path / "output").open("w") as output:
        places: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, env=environment(LAUNCH=GLOO), **places)
        try:
            shown = (tmp_path / "output").read_text
            wait_until(lambda: "after epoch 2" in log_of(tmp_path, "coarse"), 120, "it", shown, 0.2, process)
            os.killpg(process.pid, number)
            assert process.wait(timeout=60) == STOPPED
        finally:
            process.kill()
    assert log_of(tmp_path, "coarse").splitlines()[-1].startswith("stopped at step ")
    assert not (tmp_path / "chain" / "fine").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "demo"], "usage: coarse_to_fine DATA_DIR COARSE_RECIPE FINE_RECIPE"),
        (["data", "demo", "demo", "--resume", "auto"], "--resume is set by this script"),
        (["data", "demo", "demo", "--fine", "--name", "x"], "--name VALUE applies to both stages"),
        (["data", "demo", "demo", "--output=x"], "Write --output x, with a space."),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], message: str) -> None:
    done = run([SCRIPT, *arguments])
    assert done.returncode == 2
    assert message in done.stdout


def test_a_job_keeps_the_python_of_its_site(tmp_path):
    (tmp_path / "python").symlink_to("/bin/echo")
    done = run(command_of(tmp_path, tmp_path, 2), PATH=f"{tmp_path}:/usr/bin:/bin", ACTIVATE_FILE="/site")
    assert done.stdout.startswith("-m horovod_volo.train"), done.stdout
