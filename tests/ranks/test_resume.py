"""A run that is stopped and resumed is bit-identical to an uninterrupted one, also with other settings."""

import contextlib
import hashlib
import json
import shutil
import tomllib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from horovod_volo.cluster.world import World
from horovod_volo.config.recipe import assemble, load_recipe
from horovod_volo.engine.checkpoint.files import find_checkpoint
from horovod_volo.engine.checkpoint.resuming import restore_state
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.state import build_state
from horovod_volo.models.build import freeze
from horovod_volo.pack import main as pack
from tests import runs
from tests.ranks.launching import alone, launcher, on_ranks, python, run
from tests.runs import (
    FAILED,
    MISTAKE,
    SMALL,
    STOPPED,
    assert_same_state,
    assert_same_tensors,
    records,
    state,
    steps,
)

STEPS_PER_EPOCH = 5  # of 40 images, 4 on each of 2 ranks
MORE = ("--epochs", "2", "--warmup-epochs", "1", "--ema-decay", "0.9", "--drop-path", "0.2")
MORE += ("--log-every", "2")
ON_ONE = {"ranks": 1}
AUTO = ("--resume", "auto")


def start(images: Path, output: Path, *flags: str, **settings: Any) -> str:
    labels = ("--token-label-data", str(images / "token_labels"), "--mix-token")
    more = (*MORE, *labels, "--clip-grad", "1", "--eval-every", "1")
    return runs.start(images, output, *more, *flags, **settings)


def test_a_run_that_continues_another_one_at_the_end_of_an_epoch_is_evaluated(images, tmp_path):
    """The checkpoint that the evaluation belongs to is in the folder of the other run."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert " (corrected geometry, maps of " in start(images, first, stop_at=10, **ON_ONE)
    checkpoint = Path("run", "checkpoints", "step_00000010")
    assert not (first / checkpoint / "evaluation.json").exists()
    shown = start(images, second, "--resume", str(first / checkpoint), stop_at=11, **ON_ONE)
    assert "after epoch 1 of" in shown
    assert (second / checkpoint / "evaluation.json").exists()


def test_where_a_resumed_checkpoint_lies_is_decided_on_rank_zero(images, tmp_path):
    """Rank 1 is in another folder, as a rank on a host that mounts the run folder at another place."""
    start(images, tmp_path, stop_at=STEPS_PER_EPOCH)
    (tmp_path / "elsewhere").mkdir()
    in_own_folder = ["sh", "-c", '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || cd elsewhere; exec "$@"', "sh"]
    resume = ("--resume", str(tmp_path / "run"), "--hang-timeout", "10", "--stop-at-step", "6")
    arguments = [*SMALL, *MORE, *resume, "--output", ".", "--name", "run", "--eval-every", "1"]
    arguments += ["--catalog-dir", str(tmp_path / "catalogs")]
    train = [*python(), "-m", "horovod_volo.train", str(images), *arguments]
    command = [*launcher("mpi", 2), *in_own_folder, *train]
    with contextlib.chdir(tmp_path):
        resumed = run(command, seconds=60)
    assert resumed.returncode == STOPPED, resumed.stdout
    assert "after epoch 1 of" in resumed.stdout


def test_a_run_that_is_stopped_three_times_is_bit_identical(images, tmp_path):
    """Within an epoch, at its end, and in the next one; pictures change nothing."""
    uninterrupted, stopped = tmp_path / "uninterrupted", tmp_path / "stopped"
    start(images, uninterrupted)
    shown = (*AUTO, "--images-every", "1")
    stops = [3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 2]
    for stop, start_with in zip(stops, ("mpi", "gloo", "mpi"), strict=True):
        start(images, stopped, *shown, stop_at=stop, start_with=start_with)
    assert f"at step {stops[-1]}" in start(images, stopped, *shown)
    assert_same_state(uninterrupted, stopped)
    assert {name.split()[0] for name in state(stopped)} == {"model", "optimizer", "ema"}
    evaluated = [
        [without_measurements(record) for record in records(output, "top1")]
        for output in (uninterrupted, stopped)
    ]
    assert evaluated[0] == evaluated[1]
    assert len(evaluated[0]) == 2
    check_shown(stopped, stops)


def without_measurements(record: dict[str, Any]) -> dict[str, Any]:
    measured = ("images_per_second", "data_wait", "hours", "model_tflops", "host_memory_gib", "slowest_rank")
    groups = ("time_", "step_seconds_")
    return {
        name: each for name, each in record.items() if name not in measured and not name.startswith(groups)
    }


def check_shown(output: Path, stops: list[int]) -> None:
    """Assert that TensorBoard shows the resumed run as one, and that its hours count on."""
    from tests.ranks.board_reading import check_board  # ranks import this module without TensorBoard

    points = steps(output)
    assert points == sorted(set(points))
    more = {"train/token_loss"}
    board = check_board(output, points=points, evaluations=[5, 10], more=more, ranks=2)
    assert board.steps("run", "run/recipe") == [0, *stops]
    assert board.steps("run", "training/batch") == [0, 5]
    hours = [record["hours"] for record in records(output)]
    assert hours == sorted(hours)
    assert hours[0] > 0
    for record in records(output):
        parts = [value for name, value in record.items() if name.startswith("time_")]
        assert not parts or sum(parts) == pytest.approx(1, abs=1e-4)


def test_a_resumed_run_of_muon_with_fp16_compression_is_bit_identical(images, tmp_path):
    """The scales of messages depend on the maxima of earlier steps, so the checkpoint has them."""
    uninterrupted, stopped = tmp_path / "uninterrupted", tmp_path / "stopped"
    flags = ("--compression", "fp16", "--opt", "muon", "--epochs", "1")
    start(images, uninterrupted, *flags)
    start(images, stopped, *flags, stop_at=3)
    saved = state(stopped)
    for name in ("network.2.0.mlp.fc1.weight/momentum_buffer", "head.weight/exp_avg", "head.weight/step"):
        assert saved[f"optimizer {name}"].any()
    assert (saved["exchange running_maxima"] > 0).all()
    start(images, stopped, *flags, *AUTO)
    assert_same_state(uninterrupted, stopped)


UNCLIPPED = (*MORE, *AUTO, "--drop-path", "0.0", "--eval-every", "2", "--clip-grad", "0")
SHARDED = (*UNCLIPPED, "--shard-optimizer")
PARTS = "patch_embed,network.0,head"


def test_a_sharded_run_with_frozen_parts_is_bit_identical_to_an_unsharded_one(images, tmp_path):
    """A resumed run may use an unsharded optimizer. Frozen weights stay, and have no state."""
    plain, sharded, frozen = tmp_path / "plain", tmp_path / "sharded", ("--freeze", PARTS)
    shown = runs.start(images, plain, *UNCLIPPED, *frozen)
    assert f"parameters; frozen: {PARTS}; each rank sends " in shown
    runs.start(images, sharded, *SHARDED, *frozen, stop_at=3)
    refused = runs.start(
        images, sharded, *SHARDED, "--freeze", "patch_embed", "--batch-size", "8", ranks=1, status=MISTAKE
    )
    assert f"has freeze {PARTS}, this run has patch_embed" in refused
    assert f"Give --freeze {PARTS}, or start a new run with --finetune." in refused
    runs.start(images, sharded, *UNCLIPPED, *frozen, stop_at=7)
    runs.start(images, sharded, *SHARDED, *frozen)
    assert_same_state(plain, sharded)

    saved = state(plain)
    config = assemble(load_recipe(str(plain / "run" / "resolved.toml")), fallback_name="")
    torch.manual_seed(config.run.seed)
    network = Classification().build(config, 10).module
    freeze(network, PARTS, ("head", "aux_head"))
    for name, parameter in network.named_parameters():
        moved = not torch.equal(parameter, saved[f"model {name}"])
        assert moved == parameter.requires_grad == (f"optimizer {name}/exp_avg" in saved), name
        assert moved == (not torch.equal(parameter, saved[f"ema {name}"]))
    buffers = dict(network.named_buffers())
    assert len(buffers) == 9  # mean, variance and count of three layers
    for name, buffer in buffers.items():
        assert torch.equal(buffer, saved[f"model {name}"]), name


def loaded_state(world: World, *, folder: Path) -> dict[str, torch.Tensor]:
    """Load the last checkpoint of a sharded run on this rank; return the full state that was loaded."""
    config = assemble(load_recipe(str(folder / "resolved.toml")), fallback_name="")
    device = torch.device("cpu")
    own, _ = build_state(config, world, Classification(), num_classes=10, device=device, finetune="")
    # Every rank but the first starts with values that differ from the checkpoint.
    if world.rank:
        for tensor in own.replicated_tensors():
            tensor.fill_(world.rank)
    restore_state(own, find_checkpoint(str(folder)), world)
    return {
        f"{file} {name}": tensor.detach().clone()
        for file, tensors in own.full_state_dict().items()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    "flags", [SHARDED, (*AUTO, "--opt", "muon", "--epochs", "2")], ids=["sharded", "muon"]
)
def test_a_run_resumes_on_other_numbers_of_ranks(images, tmp_path, flags):
    """2 ranks, then 3, then 1: each run loads exactly the state that the previous one has saved."""
    call = partial(loaded_state, folder=tmp_path / "run")
    runs.start(images, tmp_path, *flags, "--batch-size", "6", stop_at=2)  # of 3 steps an epoch
    saved = state(tmp_path)
    ((first, *rest),) = on_ranks(tmp_path / "3", call, ranks=3)
    assert_same_tensors(saved, first)
    for rank in rest:  # only rank 0 gathers a sharded optimizer's state
        assert_same_tensors(
            *({n: t for n, t in each.items() if "optimizer" not in n} for each in (saved, rank))
        )
    runs.start(images, tmp_path, *flags, ranks=3, stop_at=4)
    assert_same_tensors(state(tmp_path), alone(call))
    runs.start(images, tmp_path, *flags, "--batch-size", "12", ranks=1)
    assert state(tmp_path)["optimizer head.weight/step"] == 6


def test_a_run_with_global_batch_resumes_on_fewer_ranks(images, tmp_path):
    """The same command on one rank has twice the micro-batches and the same samples in each step."""
    global_batch = ("--global-batch", "8")
    shown = start(images, tmp_path, *global_batch, stop_at=3)
    assert "8 images per step = 2 ranks x 4 images x 1 micro-batches" in shown
    assert "8 images per step, learning rates are stated for 32: peak learning rate 0.0005" in shown
    shown = start(images, tmp_path, *global_batch, *AUTO, **ON_ONE)
    assert "8 images per step = 1 ranks x 4 images x 2 micro-batches" in shown
    assert "at step 3: epoch 0." in shown
    settings = tomllib.loads((tmp_path / "run" / "resolved.toml").read_text())
    assert (settings["data"]["global_batch"], settings["data"]["batch_size"]) == (8, 4)
    assert settings["update"]["accumulation"] == 2
    assert [record["images_seen"] for record in records(tmp_path, "top1")] == [40, 80]


def test_an_early_stop_ends_a_run_as_finished_where_it_would_have_without_a_stop(images, tmp_path):
    """So small a learning rate changes no prediction, nor does frozen batch norm: the first is best."""
    still = ("--freeze", "patch_embed", "--lr", "1e-12", "--min-lr", "0", "--warmup-epochs", "0")
    length = ("--eval-every", "1", "--early-stop", "2", "--epochs", "5", "--cooldown-epochs", "2")
    flags = (*still, *length, *AUTO)
    runs.start(images, tmp_path, *flags, stop_at=12)
    for ranks in (2, 1):
        shown = runs.start(images, tmp_path, *flags, "--batch-size", str(8 // ranks), ranks=ranks)
        assert "done: 15 steps of 35, because 2 evaluations in a row were no better than the best" in shown
        assert steps(tmp_path, "top1") == [5, 10, 15]
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step_00000005"


def test_batch_norm_over_two_ranks_trains_as_on_one(images, tmp_path):
    def trained(name: str, *flags: str, ranks: int) -> torch.Tensor:
        flags = ("--drop-path", "0", "--batch-size", str(8 // ranks), *flags)
        runs.start(images, tmp_path / name, *flags, ranks=ranks)
        weights = [each for key, each in state(tmp_path / name).items() if key.startswith("model")]
        return torch.cat([tensor.double().flatten() for tensor in weights])

    one, two = (trained(str(ranks), "--sync-bn", "all", ranks=ranks) for ranks in (1, 2))
    apart = trained("apart", ranks=2)
    assert (two - one).abs().mean() < 0.02 * (apart - one).abs().mean()
    refused = runs.start(images, tmp_path, "--sync-bn", "heads", ranks=1, status=MISTAKE)
    assert "--sync-bn heads is for segmentation" in refused


def remove_metadata(checkpoint: Path, *keys: str) -> None:
    """Remove metadata from a checkpoint that earlier versions did not write."""
    metadata = json.loads((checkpoint / "state.json").read_text())
    del metadata["checksum"]
    for key in keys:
        del metadata[key]
    metadata["checksum"] = hashlib.sha256(json.dumps(metadata).encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(metadata))


def test_a_run_with_a_warm_up_of_averages_resumes_only_with_it(images, tmp_path):
    start(images, tmp_path, "--ema-warmup", stop_at=3, **ON_ONE)
    # Earlier versions always warmed the averages up and did not record it.
    remove_metadata(tmp_path / "run" / "checkpoints" / "step_00000003", "ema_warmup")
    refused = start(images, tmp_path, *AUTO, **ON_ONE, status=MISTAKE)
    assert "has ema_warmup True, this run has False" in refused
    assert "Give --ema-warmup, or" in refused
    start(images, tmp_path, *AUTO, "--ema-warmup", **ON_ONE)


def with_aux_head(checkpoint: Path) -> None:
    """Change a checkpoint into one of an earlier version, which had an untrained auxiliary head."""
    head = {"aux_head.weight": torch.full((10, 96), 0.02), "aux_head.bias": torch.zeros(10)}
    moments = {
        f"{name}/{key}": torch.zeros_like(tensor if key != "step" else torch.zeros(()))
        for name, tensor in head.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    metadata = json.loads((checkpoint / "state.json").read_text())
    for file, added in (("model", head), ("ema", head), ("optimizer", moments)):
        path = checkpoint / f"{file}.safetensors"
        save_file(load_file(path) | added, path)
        metadata["sha256"][file] = hashlib.sha256(path.read_bytes()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(metadata))
    remove_metadata(checkpoint, "aux_head")


def test_a_run_without_token_labels_resumes_without_its_untrained_auxiliary_head(images, tmp_path):
    plain, earlier = tmp_path / "plain", tmp_path / "earlier"
    flags = ("--no-token-label", "--ema-decay", "0.9", *AUTO)
    runs.start(images, plain, *flags, stop_at=2, **ON_ONE)
    shutil.copytree(plain, earlier, symlinks=True)
    with_aux_head(earlier / "run" / "checkpoints" / "step_00000002")
    runs.start(images, plain, *flags, **ON_ONE)
    shown = runs.start(images, earlier, *flags, **ON_ONE)
    assert "step_00000002 is left out: this run does not train it" in shown
    assert_same_state(plain, earlier)
    refused = runs.start(images, plain, *flags, "--token-label", **ON_ONE, status=MISTAKE)
    assert "Give --no-token-label, or start a new run with --finetune." in refused


EPOCHS, STEPS, GLOBAL_BATCH = 2, 4, 12
SAVED_AT, KILLED_AT, STOPPED_AT = 2, 3, 5


def test_a_killed_and_resumed_epoch_has_each_sample_once(demo_images, tmp_path, monkeypatch):
    """Of shards, the last with fewer images; tests/faults/test_lost_ranks.py has images in folders."""
    folder, shards = tmp_path / "records", tmp_path / "shards"
    assert pack([str(demo_images(48, 10)), str(shards), "--shard-images", "20", "--workers", "1"]) == 0
    folder.mkdir()
    monkeypatch.setenv("CONSUMED", str(folder))
    flags = ("--resume", "auto", "--epochs", str(EPOCHS), "--checkpoint-every", str(SAVED_AT))
    flags += ("--log-every", "1", "--block-shuffle", "5", "--shuffle-window", "3")

    def attempt(ranks: int, start_with: str, fault: str, **end: int) -> tuple[str, dict[int, Counter[int]]]:
        more = (*flags, "--batch-size", str(GLOBAL_BATCH // ranks))
        settings = {"ranks": ranks, "start_with": start_with, "fault": fault}
        return runs.start(shards, tmp_path, *more, **settings, **end), read_records(folder, ranks)

    _, first = attempt(2, "gloo", f"1:{KILLED_AT}:SIGKILL", status=FAILED)
    shown, second = attempt(2, "mpi", "1:99:SIGKILL", stop_at=STOPPED_AT)
    assert f"at step {SAVED_AT}" in shown
    shown, third = attempt(3, "mpi", "1:99:SIGKILL")
    assert f"at step {STOPPED_AT}" in shown
    assert KILLED_AT in first
    assert first[SAVED_AT] == second[SAVED_AT]
    # The steps of an attempt after its last checkpoint are repeated by the next attempt.
    final = [first[step] for step in range(SAVED_AT)]
    final += [second[step] for step in range(SAVED_AT, STOPPED_AT)]
    final += [third[step] for step in range(STOPPED_AT, EPOCHS * STEPS)]
    for epoch in range(EPOCHS):
        counts = sum(final[epoch * STEPS : (epoch + 1) * STEPS], Counter())
        assert counts == dict.fromkeys(range(48), 1)


def read_records(folder: Path, ranks: int) -> dict[int, Counter[int]]:
    """Return the images of each step over all ranks of an attempt, and remove its files."""
    images: dict[int, Counter[int]] = {}
    files = sorted(folder.iterdir())
    assert len(files) == ranks
    for file in files:
        for line in file.read_text().splitlines():
            step, indices = json.loads(line)
            images.setdefault(step, Counter()).update(indices)
        file.unlink()
    return images
