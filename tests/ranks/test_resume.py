"""A run that is stopped and resumed is bit-identical to an uninterrupted one."""

import contextlib
import hashlib
import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.board_reading import check_board
from tests.ranks.launching import launcher, python, run, train

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "2", "--warmup-epochs", "1")
STEPS_PER_EPOCH = 5  # of 40 images, 4 on each of 2 ranks


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=40, val=20)
    return folder


def start(images: Path, output: Path, *arguments: str, start_with: str = "gloo", ranks: int = 2):
    labels = ("--token-label-data", str(images / "token_labels"))
    more = (
        "--ema-decay",
        "0.9",
        "--drop-path",
        "0.2",
        "--clip-grad",
        "1",
        "--log-every",
        "2",
        "--mix-token",
        "--eval-every",
        "1",
    )
    where = ("--output", str(output), "--name", "run")
    return train(str(images), *SMALL, *labels, *more, *where, *arguments, ranks=ranks, start_with=start_with)


def last_state(output: Path):
    folder = output / "run" / "checkpoints" / "last"
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def metrics(output: Path):
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    measured = ("images_per_second", "data_wait", "hours", "model_tflops", "host_memory_gib", "slowest_rank")
    groups = ("time_", "step_seconds_")
    return [
        {key: value for key, value in record.items() if key not in measured and not key.startswith(groups)}
        for record in records
    ]


def test_a_run_that_continues_another_one_at_the_end_of_an_epoch_is_evaluated(images, tmp_path):
    """The checkpoint that the evaluation belongs to is in the folder of the other run."""
    first = start(images, tmp_path, "--stop-at-step", "10", start_with="none", ranks=1)
    assert first.returncode == 75, first.stdout
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000010"
    assert not (checkpoint / "evaluation.json").exists()
    second = start(
        images,
        tmp_path,
        "--resume",
        str(checkpoint),
        "--name",
        "other",
        "--stop-at-step",
        "11",
        ranks=1,
        start_with="none",
    )
    assert second.returncode == 75, second.stdout
    assert "after epoch 1 of" in second.stdout
    assert (tmp_path / "other" / "checkpoints" / "step_00000010" / "evaluation.json").exists()


def test_where_a_resumed_checkpoint_lies_is_decided_on_rank_zero(images, tmp_path):
    """Rank 1 is in another folder, as a rank on a host that mounts the run folder at another place."""
    stopped = start(images, tmp_path, "--stop-at-step", str(STEPS_PER_EPOCH))
    assert f"stopped at step {STEPS_PER_EPOCH} and saved" in stopped.stdout
    (tmp_path / "elsewhere").mkdir()
    in_own_folder = ["sh", "-c", '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || cd elsewhere; exec "$@"', "sh"]
    resume = ("--resume", str(tmp_path / "run"), "--hang-timeout", "10", "--stop-at-step", "6")
    resume = (*resume, "--catalog-dir", str(tmp_path / "catalogs"))
    arguments = [
        str(images),
        *SMALL,
        "--output",
        ".",
        "--name",
        "run",
        "--ema-decay",
        "0.9",
        "--eval-every",
        "1",
        *resume,
    ]
    command = [*launcher("mpi", 2), *in_own_folder, *python(), "-m", "horovod_volo.train", *arguments]
    with contextlib.chdir(tmp_path):
        resumed = run(command, seconds=60)
    assert resumed.returncode == 75, resumed.stdout
    assert "after epoch 1 of" in resumed.stdout


@pytest.fixture(scope="module")
def uninterrupted(images, tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted")
    done = start(images, output)
    assert done.returncode == 0, done.stdout
    return output


@pytest.mark.parametrize("stop_at", [STEPS_PER_EPOCH, 3, STEPS_PER_EPOCH + 2])
def test_a_stopped_and_resumed_run_is_bit_identical(images, uninterrupted, tmp_path, stop_at):
    shown = ("--histograms-every", "1", "--images-every", "1")  # which change nothing
    stopped = start(images, tmp_path, "--stop-at-step", str(stop_at), *shown, start_with="mpi")
    assert stopped.returncode == 75, stopped.stdout
    resumed = start(images, tmp_path, "--resume", "auto", *shown)
    assert resumed.returncode == 0, resumed.stdout
    assert f"at step {stop_at}" in resumed.stdout
    expected, found = last_state(uninterrupted), last_state(tmp_path)
    assert set(found) == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    for file in expected:
        assert expected[file].keys() == found[file].keys()
        for name, tensor in expected[file].items():
            assert tensor.equal(found[file][name]), (file, name)
    by_step = {(record["step"], "top1" in record): record for record in metrics(uninterrupted)}
    ends = [record for record in metrics(tmp_path) if "top1" in record]
    assert len(ends) == 2
    for record in ends:
        assert record == by_step[record["step"], True]
    check_shown(tmp_path, stop_at)


def check_shown(runs: Path, stop_at: int) -> None:
    """Assert that TensorBoard shows the resumed run as one, and that its hours count on."""
    records = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    points = [record["step"] for record in records if "lr" in record]
    assert points == sorted(set(points))
    more = {"train/token_loss", "train/token_loss_smoothed"}
    board = check_board(runs, points=points, evaluations=[5, 10], more=more, ranks=2)
    starts = [0, stop_at]
    assert board.steps("run", "run/recipe") == starts
    assert board.steps("run", "training/batch") == board.steps("run", "weights/network.0.0") == [0, 5]
    assert board.tags("run", "histograms") >= {"weights/head", "gradients/head", "gradients/network.2.0"}
    hours = [record["hours"] for record in records]
    assert hours == sorted(hours)
    assert hours[0] > 0
    for record in records:
        parts = [value for name, value in record.items() if name.startswith("time_")]
        assert not parts or sum(parts) == pytest.approx(1, abs=1e-4)


def test_a_resumed_run_with_fp16_compression_is_bit_identical(images, tmp_path):
    """The scales of buckets depend on the maxima of earlier steps, so the checkpoint contains them."""
    fp16 = ("--compression", "fp16", "--epochs", "1")
    complete, stopped = tmp_path / "uninterrupted", tmp_path / "stopped"
    assert start(images, complete, *fp16).returncode == 0
    assert "stopped at step 3" in start(images, stopped, *fp16, "--stop-at-step", "3").stdout
    assert start(images, stopped, *fp16, "--resume", "auto").returncode == 0
    expected, found = last_state(complete), last_state(stopped)
    assert (expected["exchange.safetensors"]["running_maxima"] > 0).all()
    for file in expected:
        assert expected[file].keys() == found[file].keys()
        assert all(tensor.equal(found[file][name]) for name, tensor in expected[file].items()), file


def test_a_batch_that_would_shift_the_samples_is_refused(images, uninterrupted, tmp_path):
    stopped = start(images, tmp_path, "--stop-at-step", "3")
    assert "stopped at step 3 and saved" in stopped.stdout
    refused = start(images, tmp_path, "--resume", "auto", start_with="none", ranks=1)
    assert refused.returncode == 2
    assert "With 1 ranks, batch size x accumulation must be 8: --global-batch 8 sets both." in refused.stdout
    allowed = start(images, tmp_path, "--resume", "auto", "--batch-size", "8", start_with="none", ranks=1)
    assert allowed.returncode == 0, allowed.stdout


def test_a_run_with_global_batch_resumes_on_fewer_ranks(images, tmp_path):
    """The same command on one rank has twice the micro-batches and the same samples in each step."""
    global_batch = ("--global-batch", "8")
    stopped = start(images, tmp_path, *global_batch, "--stop-at-step", "3")
    assert stopped.returncode == 75 or "stopped at step 3 and saved" in stopped.stdout, stopped.stdout
    assert "8 images per step = 2 ranks x 4 images x 1 micro-batches" in stopped.stdout
    assert "8 images per step, learning rates are stated for 32: peak learning rate 0.0005" in stopped.stdout
    resumed = start(images, tmp_path, *global_batch, "--resume", "auto", start_with="none", ranks=1)
    assert resumed.returncode == 0, resumed.stdout
    assert "8 images per step = 1 ranks x 4 images x 2 micro-batches" in resumed.stdout
    assert "at step 3: epoch 0." in resumed.stdout
    settings = tomllib.loads((tmp_path / "run" / "resolved.toml").read_text())
    found = (
        settings["data"]["global_batch"],
        settings["data"]["batch_size"],
        settings["update"]["accumulation"],
    )
    assert found == (8, 4, 2)
    seen = [record["images_seen"] for record in metrics(tmp_path) if "top1" in record]
    assert seen == [40, 80]


def test_a_peak_below_the_final_learning_rate_is_refused_at_the_start(images, tmp_path):
    refused = start(images, tmp_path, "--lr", "1e-6", start_with="none", ranks=1)
    assert refused.returncode == 2
    assert "the peak learning rate is 1e-06, below --min-lr, which is 1e-05" in refused.stdout
    assert not (tmp_path / "run").exists()


def remove_metadata(checkpoint: Path, *keys: str) -> None:
    """Remove metadata from a checkpoint that earlier versions did not write."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["checksum"]
    for key in keys:
        del state[key]
    state["checksum"] = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(state))


def test_a_run_with_a_warm_up_of_averages_resumes_only_with_it(images, tmp_path):
    alone = {"start_with": "none", "ranks": 1}
    stopped = start(images, tmp_path, "--stop-at-step", "3", "--ema-warmup", **alone)
    assert stopped.returncode == 75, stopped.stdout
    # Earlier versions always warmed the averages up and did not record it.
    remove_metadata(tmp_path / "run" / "checkpoints" / "step_00000003", "ema_warmup")
    refused = start(images, tmp_path, "--resume", "auto", **alone)
    assert refused.returncode == 2, refused.stdout
    assert "has ema_warmup True, this run has False" in refused.stdout
    assert "Give --ema-warmup." in refused.stdout
    resumed = start(images, tmp_path, "--resume", "auto", "--ema-warmup", **alone)
    assert resumed.returncode == 0, resumed.stdout


def with_aux_head(checkpoint: Path) -> None:
    """Change a checkpoint into one of an earlier version, which had an untrained auxiliary head."""
    head = {"aux_head.weight": torch.full((10, 96), 0.02), "aux_head.bias": torch.zeros(10)}
    moments = {
        f"{name}/{key}": torch.zeros_like(tensor if key != "step" else torch.zeros(()))
        for name, tensor in head.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    state = json.loads((checkpoint / "state.json").read_text())
    for file, added in (("model", head), ("ema", head), ("optimizer", moments)):
        path = checkpoint / f"{file}.safetensors"
        save_file(load_file(path) | added, path)
        state["sha256"][file] = hashlib.sha256(path.read_bytes()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(state))
    remove_metadata(checkpoint, "aux_head")


def test_a_run_without_token_labels_resumes_without_its_untrained_auxiliary_head(images, tmp_path):
    alone = ("--recipe", "demo", "--img-size", "32", "-b", "8", "--epochs", "1", "--no-token-label")
    alone += ("--ema-decay", "0.9", "--warmup-epochs", "0")

    def run(name: str, *arguments: str):
        more = (*alone, "--output", str(tmp_path), "--name", name, *arguments)
        return train(str(images), *more, ranks=1, start_with="none")

    stopped = run("run", "--stop-at-step", "2")
    assert stopped.returncode == 75, stopped.stdout
    shutil.copytree(tmp_path / "run", tmp_path / "earlier" / "run", symlinks=True)
    with_aux_head(tmp_path / "earlier" / "run" / "checkpoints" / "step_00000002")
    assert run("run", "--resume", "auto").returncode == 0
    resumed = run("earlier/run", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout
    assert "step_00000002 is left out: this run does not train it" in resumed.stdout
    expected, found = last_state(tmp_path), last_state(tmp_path / "earlier")
    for file in expected:
        assert expected[file].keys() == found[file].keys()
        assert all(tensor.equal(found[file][name]) for name, tensor in expected[file].items())
    refused = run("run", "--resume", "auto", "--token-label")
    assert refused.returncode == 2
    assert "Give --no-token-label, or start a new run with --finetune." in refused.stdout
