"""jobs/*.sbatch under a real Slurm: several nodes, stop requests, time limits and failures."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_volo.data.demo.demo_set import make_demo_set
from tests.cluster.slurm import Slurm, SlurmJob, kill, running_slurm, wait_until

pytestmark = pytest.mark.needs("slurmctld", "slurmd", "sbatch", "munged")

SMALL = ("--img-size", "32", "--warmup-epochs", "0", "--clip-grad", "0", "--log-every", "1", "--workers", "1")
TRAINER = "-m horovod_volo.train"
STEP = r"^step \d+/"


@pytest.fixture(scope="module")
def one_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=120, val=20)
    return folder


@pytest.fixture
def slurm(one_slurm: Slurm, images: Path, tmp_path: Path) -> Iterator[Slurm]:
    """Give the Slurm, with no job left by another test; jobs/env.sh finds this test's folders."""
    one_slurm.environment |= {"DATA_DIR": str(images), "OUTPUT_DIR": str(tmp_path / "runs")}
    yield one_slurm
    one_slurm.cancel_all()


def log_of(place: Path, run: str = "demo") -> str:
    return (place / "runs" / run / "log.txt").read_text(encoding="utf-8")


def numbers(expression: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(expression, text)]


def assert_goes_on_where_it_stopped(log: str, times: int) -> None:
    stopped = numbers(r"stopped at step (\d+) and saved", log)
    assert len(stopped) == times
    assert numbers(r"resumed  at step (\d+)", log) == stopped


def test_a_recipe_trains_over_both_nodes_and_is_fine_tuned(
    slurm: Slurm, tmp_path: Path, images: Path
) -> None:
    # A site may pass on little of the environment that a job is submitted in.
    export = f"--export=DATA_DIR={images},OUTPUT_DIR={tmp_path}/runs,OMPI_MCA_mpi_yield_when_idle=1"
    flags = (*SMALL, "--epochs", "1", "--batch-size", "6")
    job = slurm.submit(tmp_path, export, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)
    job.ends("COMPLETED")
    assert re.match(rf"commit [0-9a-f]{{12}}, job {job.number}, start 1, 2 ranks on n1 n2\n", job.text())
    assert "2 ranks on 2 hosts, launcher mpirun" in log_of(tmp_path)
    assert "done: 10 steps" in log_of(tmp_path)
    facts = json.loads((tmp_path / "runs" / "demo" / "environment.json").read_text(encoding="utf-8"))
    assert facts["hosts"] == ["n1", "n2"]

    weights = str(tmp_path / "runs" / "demo")
    job = slurm.submit(tmp_path, "jobs/finetune.sbatch", "demo", weights, "--name", "fine", *flags, nodes=2)
    job.ends("COMPLETED")
    assert f"weights from {weights}" in log_of(tmp_path, "fine")


def test_the_smoke_job_finds_all_well(slurm: Slurm, tmp_path: Path) -> None:
    words = ("sbatch", "-W", "--ntasks-per-node=1", f"--output={tmp_path}/job.txt", "jobs/smoke.sbatch")
    done = slurm.call(*words, "--img-size", "32", seconds=240)
    text = (tmp_path / "job.txt").read_text(encoding="utf-8")
    assert done.returncode == 0, text
    assert text.endswith("passed: 2 ranks on n1 n2 have trained, stopped and resumed\n")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_that_is_asked_to_stop_queues_again_whenever_and_however_often_it_is_asked(
    slurm: Slurm, tmp_path: Path
) -> None:
    flags = (*SMALL, "--epochs", "1", "--batch-size", "1")
    job = slurm.submit(tmp_path, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)

    def ask_twice(*options: str) -> None:
        for _ in range(2):
            slurm.call("scancel", "--signal=USR1", *options, job.number)

    wait_until(lambda: slurm.processes_on("n2", TRAINER) != [], 60, "ranks that do not listen yet", job.story)
    ask_twice("--full")  # script, launcher and ranks
    job.says("start 2, 2 ranks")
    job.says(rf"start 2(.|\n)*{STEP}")
    ask_twice()  # the ranks that are not on the node of the script
    job.ends("COMPLETED")
    assert job.facts()["Restarts"] == "2"
    assert job.text().count("has stopped and is requeued") == 2
    assert_goes_on_where_it_stopped(log_of(tmp_path), 2)
    assert "done: 60 steps" in log_of(tmp_path)


def test_a_job_that_reaches_its_time_limit_queues_again(slurm: Slurm, tmp_path: Path) -> None:
    limit = ("--time=1", "--signal=B:USR1@20")
    flags = (*SMALL, "--epochs", "1", "--batch-size", "6")
    job = slurm.submit(tmp_path, *limit, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)
    job.says(STEP)
    ranks = slurm.processes_on("n2", TRAINER)
    kill(ranks, signal.SIGSTOP)  # or these few steps would be over before the limit
    job.says("Forwarding signal", seconds=90)
    kill(ranks, signal.SIGCONT)
    job.says("has stopped and is requeued")
    slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")
    job.ends("COMPLETED")
    assert job.facts()["Restarts"] == "1"
    assert_goes_on_where_it_stopped(log_of(tmp_path), 1)
    assert "done: 10 steps" in log_of(tmp_path)


def assert_failed_for_good(job: SlurmJob) -> None:
    facts = job.facts()
    assert facts["Restarts"] == "0"
    assert facts["ExitCode"] not in ("0:0", "75:0")
    assert "requeued" not in job.text()


def test_a_killed_rank_fails_the_job_within_seconds(slurm: Slurm, tmp_path: Path) -> None:
    flags = (*SMALL, "--epochs", "90", "--batch-size", "1")
    job = slurm.submit(tmp_path, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)
    job.says(STEP, times=2)
    kill(slurm.processes_on("n2", TRAINER))
    job.ends("FAILED", seconds=30)
    assert_failed_for_good(job)


def test_a_launcher_that_ends_well_before_training_does_fails_the_job(slurm: Slurm, tmp_path: Path) -> None:
    # As mpirun does, now and then, where a node is lost; with this flag it always does.
    job = slurm.submit(tmp_path, "jobs/pretrain.sbatch", "demo", *SMALL, nodes=2, MPI_FLAGS="--version")
    job.ends("FAILED", seconds=30)
    assert_failed_for_good(job)
    assert "error: mpirun ended before training was finished" in job.text()


def test_a_rank_that_cannot_start_fails_the_job(slurm: Slurm, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"""#!/bin/sh\n[ "$(hostname)" = n1 ] && PATH=${{PATH#{tmp_path}/bin:}} exec python "$@"\n"""
    )
    activate = tmp_path / "activate"
    activate.write_text(f'source tools/activate\nPATH="{tmp_path}/bin:$PATH"\n')
    python.chmod(0o755)
    job = slurm.submit(tmp_path, "jobs/pretrain.sbatch", "demo", *SMALL, nodes=2, ACTIVATE_FILE=str(activate))
    job.ends("FAILED", seconds=60)
    assert_failed_for_good(job)
    assert job.facts()["ExitCode"] == "1:0"


def test_a_job_outside_the_checkout_says_where_it_must_be_submitted(slurm: Slurm, tmp_path: Path) -> None:
    script = str(Path(__file__).parents[2] / "jobs" / "pretrain.sbatch")
    job = slurm.submit(tmp_path, script, "demo", nodes=1, cwd=tmp_path)
    job.ends("FAILED", seconds=30)
    assert job.text() == f"error: sbatch this in the folder of the checkout, not in {tmp_path}\n"


def test_low_resolution_then_high_queues_again_in_between(slurm: Slurm, tmp_path: Path) -> None:
    short = (*SMALL[2:], "--epochs", "1", "--batch-size", "2")
    halves = ("--coarse", "--img-size", "32", "--fine", "--img-size", "32", "--lr", "1e-3")
    flags = ("--name", "chain", *short, *halves)
    job = slurm.submit(tmp_path, "jobs/coarse_to_fine.sbatch", "demo", "demo", *flags, nodes=2)
    job.says(STEP)
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    job.says("has stopped and is requeued")
    job.ends("COMPLETED")
    assert job.facts()["Restarts"] == "1"
    assert_goes_on_where_it_stopped(log_of(tmp_path, "chain/coarse"), 1)
    assert "done: 30 steps" in log_of(tmp_path, "chain/fine")
    assert f"weights from {tmp_path}/runs/chain/coarse" in log_of(tmp_path, "chain/fine")
    assert "Both stages are finished" in job.text()


def test_speed_is_measured_on_one_node_and_on_all(slurm: Slurm, tmp_path: Path) -> None:
    flags = ("--model", "volo_demo", "--img-size", "32", "--batch-size", "2", "--pairs", "2")
    job = slurm.submit(tmp_path, "jobs/scaling.sbatch", *flags, nodes=2)
    job.ends("COMPLETED")
    lines = [line.split() for line in job.text().splitlines()[2:]]
    assert [line[:2] for line in lines] == [["1", "1"], ["2", "2"]]
    speeds = [float(line[2]) for line in lines]
    assert lines[0][3] == "100.0%"
    for count, speed, (*_, efficiency) in zip((1, 2), speeds, lines, strict=True):
        assert float(efficiency.rstrip("%")) == pytest.approx(100 * speed / (count * speeds[0]), abs=0.5)


def test_lost_nodes_are_done_without_while_enough_are_left(slurm: Slurm, tmp_path: Path) -> None:
    flags = (*SMALL, "--epochs", "6", "--checkpoint-every", "2")
    job = slurm.submit(tmp_path, "jobs/elastic.sbatch", "demo", "12", "2", *flags, nodes=3)
    job.says("training on n1 n2 n3: 1 ranks per node, micro-batches per rank: 1 of 4 images")
    job.says(r"^step 3/60")
    slurm.power_off("n3")
    job.says("lost 1 of 3 nodes")
    job.says("training on n1 n2: 1 ranks per node, micro-batches per rank: 2 of 3 images")
    job.says(rf"2 ranks on 2 hosts(.|\n)*{STEP}")
    slurm.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.power_off("n2")
    job.says("has stopped and is requeued")
    for node in ("n2", "n3"):
        slurm.power_on(node)
    job.ends("COMPLETED")
    log = log_of(tmp_path)
    assert job.facts()["Restarts"] == "1"
    assert log.count("12 images per step = 3 ranks x 4 images x 1 micro-batches") == 2
    assert log.count("12 images per step = 2 ranks x 3 images x 2 micro-batches") == 1
    assert len(numbers(r"resumed  at step (\d+)", log)) == 2
    assert "done: 60 steps" in log
