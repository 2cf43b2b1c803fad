"""jobs/*.sbatch under Slurm: several nodes, stop requests, time limits and failures."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, kill, running_slurm
from tests.ranks.launching import wait_until
from tests.runs import ADAMW

pytestmark = pytest.mark.needs("slurmctld", "slurmd", "sbatch", "munged")

SMALL = ("--img-size", "32", "--warmup-epochs", "0", "--clip-grad", "0", "--log-every", "1", "--workers", "1")
SMALL += ADAMW
TRAINER = "-m horovod_volo.train"
STEP = r"^step \d+/"


@pytest.fixture(scope="module")
def one_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def images(demo_images: Callable[[int, int], Path]) -> Path:
    return demo_images(120, 20)


@pytest.fixture
def slurm(one_slurm: Slurm, images: Path, tmp_path: Path) -> Iterator[Slurm]:
    """Return the cluster without jobs; jobs/env.sh finds this test's folders."""
    site = {"DATA_DIR": str(images), "OUTPUT_DIR": str(tmp_path / "runs"), "LAUNCHER": "mpirun"}
    one_slurm.environment |= site
    yield one_slurm
    one_slurm.cancel_all()


def log_of(folder: Path, run: str = "demo") -> str:
    return (folder / "runs" / run / "log.txt").read_text(encoding="utf-8")


def numbers(expression: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(expression, text)]


def assert_resumed_where_it_stopped(log: str, times: int) -> None:
    stopped = numbers(r"stopped at step (\d+) and saved", log)
    assert len(stopped) == times
    assert numbers(r"resumed  at step (\d+)", log) == stopped


def test_a_recipe_trains_over_both_nodes_and_is_fine_tuned(slurm, tmp_path, images):
    # A site may give a job few of the variables of the environment in which it is submitted.
    export = f"--export=DATA_DIR={images},OUTPUT_DIR={tmp_path}/runs"
    flags = (*SMALL, "--epochs", "1", "--batch-size", "6")
    job = slurm.submit(tmp_path, export, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)
    job.wait_for_end("COMPLETED")
    assert re.match(rf"commit [0-9a-f]{{12}}, job {job.number}, start 1, 2 ranks on n1 n2\n", job.text())
    assert "2 ranks on 2 hosts, launcher mpirun" in log_of(tmp_path)
    assert "done: 10 steps" in log_of(tmp_path)
    metadata = json.loads((tmp_path / "runs" / "demo" / "environment.json").read_text(encoding="utf-8"))
    assert metadata["hosts"] == ["n1", "n2"]

    weights = str(tmp_path / "runs" / "demo")
    job = slurm.submit(tmp_path, "jobs/finetune.sbatch", "demo", weights, "--name", "fine", *flags, nodes=2)
    job.wait_for_end("COMPLETED")
    assert f"weights from {weights}" in log_of(tmp_path, "fine")


def test_the_smoke_job_passes(slurm, tmp_path):
    size = ("--ntasks-per-node=1", "--gpus-per-node=2", f"--output={tmp_path}/job.txt")
    done = slurm.call("sbatch", "-W", *size, "jobs/smoke.sbatch", "--img-size", "32", seconds=240)
    text = (tmp_path / "job.txt").read_text(encoding="utf-8")
    assert done.returncode == 0, text
    assert text.endswith("passed: 2 ranks on n1 n2 have trained, stopped and resumed\n")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_every_rank_sees_all_gpus_of_its_node(slurm, tmp_path, launcher):
    """With --gpus-per-task, or without a request, mpirun's ranks on the second node see one GPU or none."""
    slurm.environment["LAUNCHER"] = launcher
    script = r"""#!/usr/bin/env bash
        source jobs/under_slurm.sh
        ranks 2
        "${starter[@]}" bash -c 'echo "rank on $(uname -n) sees $CUDA_VISIBLE_DEVICES"'"""
    (tmp_path / "show").write_text(script)
    job = slurm.submit(tmp_path, str(tmp_path / "show"), nodes=2)
    job.wait_for_end("COMPLETED")
    seen = re.findall("rank on (.*)", job.text())
    assert sorted(seen) == ["n1 sees 0,1", "n2 sees 0,1"], job.text()


@pytest.mark.parametrize(
    ("launcher", "ended_by"),
    [("mpirun", "preemption"), ("mpirun", "scancel"), ("srun", "scontrol requeue"), ("srun", "preemption")],
)
def test_a_job_that_slurm_ends_saves_after_the_step(slurm, tmp_path, launcher, ended_by):
    """Slurm sends SIGTERM to the ranks, or also to launcher and script, whose SIGUSR1 may arrive first."""
    slurm.environment["LAUNCHER"] = launcher
    flags = (*SMALL, "--epochs", "90", "--batch-size", "1")
    job = slurm.submit(tmp_path, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)
    job.wait_for_output(STEP, times=2)
    if ended_by == "preemption":
        slurm.call("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
    else:
        slurm.call(*ended_by.split(), job.number)
    job.wait_for_output(r"^SIG(TERM|USR1) on rank \d(.|\n)*^stopped at step \d+ and saved")
    if ended_by == "scancel":
        job.wait_for_end("CANCELLED")
    else:
        job.wait_for_output(r"start 2, 2 ranks(.|\n)*^step \d+/")
        assert_resumed_where_it_stopped(log_of(tmp_path), 1)
    assert job.text().count("and is requeued") == (ended_by == "preemption")


@pytest.mark.soak
def test_a_job_that_receives_repeated_stop_signals_at_any_time_is_requeued(slurm, tmp_path):
    flags = (*SMALL, "--epochs", "1", "--batch-size", "1")
    job = slurm.submit(tmp_path, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)

    def signal_twice(*options: str) -> None:
        for _ in range(2):
            slurm.call("scancel", "--signal=USR1", *options, job.number)

    def is_blocked() -> bool:
        return bool(slurm.processes_on("n2", TRAINER)) and not slurm.processes_on("n2", "block_signals")

    wait_until(is_blocked, 60, "ranks that do not listen yet", job.report)
    signal_twice("--full")  # to the script, the launcher and the ranks
    job.wait_for_output("start 2, 2 ranks")
    job.wait_for_output(rf"start 2(.|\n)*{STEP}")
    signal_twice()  # to the ranks that are not on the node of the script
    job.wait_for_end("COMPLETED")
    assert job.record()["Restarts"] == "2"
    assert job.text().count("has stopped and is requeued") == 2
    assert_resumed_where_it_stopped(log_of(tmp_path), 2)
    assert "done: 60 steps" in log_of(tmp_path)


def test_a_killed_rank_fails_the_job_within_seconds(slurm, tmp_path):
    flags = (*SMALL, "--epochs", "90", "--batch-size", "1")
    job = slurm.submit(tmp_path, "jobs/pretrain.sbatch", "demo", *flags, nodes=2)
    job.wait_for_output(STEP, times=2)
    kill(slurm.processes_on("n2", TRAINER))
    job.wait_for_end("FAILED", seconds=30)
    record = job.record()
    assert record["Restarts"] == "0"
    assert record["ExitCode"] not in ("0:0", "75:0")
    assert "requeued" not in job.text()


def test_coarse_to_fine_is_requeued_after_a_stop(slurm, tmp_path):
    short = (*SMALL[2:], "--epochs", "1", "--batch-size", "2")
    stages = ("--coarse", "--img-size", "32", "--fine", "--img-size", "32", "--lr", "1e-3")
    flags = ("--name", "chain", *short, *stages)
    job = slurm.submit(tmp_path, "jobs/coarse_to_fine.sbatch", "demo", "demo", *flags, nodes=2)
    job.wait_for_output(STEP)
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_output("has stopped and is requeued")
    job.wait_for_end("COMPLETED")
    assert job.record()["Restarts"] == "1"
    assert_resumed_where_it_stopped(log_of(tmp_path, "chain/coarse"), 1)
    assert "done: 30 steps" in log_of(tmp_path, "chain/fine")
    assert f"weights from {tmp_path}/runs/chain/coarse" in log_of(tmp_path, "chain/fine")
    assert "Both stages are finished" in job.text()


def test_the_scaling_job_measures_one_node_and_all_nodes(slurm, tmp_path):
    flags = ("--model", "volo_demo", "--img-size", "32", "--batch-size", "2", "--pairs", "2")
    job = slurm.submit(tmp_path, "jobs/scaling.sbatch", *flags, nodes=2)
    job.wait_for_end("COMPLETED")
    lines = [line.split() for line in job.text().splitlines()[2:]]
    assert [line[:2] for line in lines] == [["1", "1"], ["2", "2"]]
    speeds = [float(line[2]) for line in lines]
    assert lines[0][3] == "100.0%"
    for count, speed, (*_, efficiency) in zip((1, 2), speeds, lines, strict=True):
        expected = 100 * speed / (count * speeds[0])
        rounding = expected * (0.05 / speed + 0.05 / speeds[0])  # of speeds, which are printed to 0.1
        assert float(efficiency.rstrip("%")) == pytest.approx(expected, abs=0.1 + rounding)


def test_the_elastic_job_continues_without_lost_nodes(slurm, tmp_path):
    """tests/unit/test_jobs_requeue.py shows that it is requeued when too few are left."""
    flags = (*SMALL, "--epochs", "4", "--checkpoint-every", "2")
    job = slurm.submit(tmp_path, "jobs/elastic.sbatch", "demo", "12", "2", *flags, nodes=3)
    job.wait_for_output("training on n1 n2 n3: 1 ranks per node, micro-batches per rank: 1 of 4 images")
    job.wait_for_output(r"^step 3/40")
    slurm.power_off("n3")
    job.wait_for_output("lost 1 of 3 nodes")
    job.wait_for_output("training on n1 n2: 1 ranks per node, micro-batches per rank: 2 of 3 images")
    job.wait_for_output(rf"2 ranks on 2 hosts(.|\n)*{STEP}")
    kill(slurm.processes_on("n2", "orted"))
    job.wait_for_output("mpirun lost contact with a node, but all 2 nodes respond")
    job.wait_for_output("^done: 40 steps")
    slurm.power_on("n3")  # a job is not complete while a node of it does not answer
    job.wait_for_end("COMPLETED")
    log = log_of(tmp_path)
    assert job.record()["Restarts"] == "0"
    assert log.count("12 images per step = 3 ranks x 4 images x 1 micro-batches") == 1
    assert log.count("12 images per step = 2 ranks x 3 images x 2 micro-batches") == 2
    assert len(numbers(r"resumed  at step (\d+)", log)) == 2
    assert "done: 40 steps" in log
