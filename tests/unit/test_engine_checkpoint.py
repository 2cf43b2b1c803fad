"""Checkpoints are bit-identical, complete or absent, and damage to them is detected."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import mounted_disk
from torch import Tensor

from horovod_volo.core.errors import UserError
from horovod_volo.engine.checkpoint.files import (
    CheckpointWriter,
    clean_up,
    delete_old_checkpoints,
    find_checkpoint,
    find_damage,
    has_checkpoint,
    read_metadata,
    read_tensors,
    update_link,
    write_checkpoint,
)
from horovod_volo.models.weights import read_weights

Files = dict[str, dict[str, Tensor]]
METADATA = {"model": "volo_demo", "seed": 42, "scaler": {"scale": 65536.0, "_growth_tracker": 3}}


def files(number: float = 1.0, length: int = 5) -> Files:
    return {
        "model": {"weight": torch.full((length,), number), "count": torch.tensor(int(number))},
        "optimizer": {"weight/exp_avg": torch.full((2, 3), -number)},
    }


def save(run: Path, step: int, number: float = 1.0) -> Path:
    return write_checkpoint(run / "checkpoints", step, files(number), METADATA)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def weight_of(checkpoint: Path) -> float:
    return float(read_tensors(checkpoint)["model"]["weight"][0])


# Completeness


def test_every_kind_of_tensor_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    storage = torch.randn(100, generator=random)
    tensors = {
        "float": torch.randn(3, 4, 5, generator=random),
        "special values": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "half": torch.randn(7, generator=random).half(),
        "bf16": torch.randn(7, generator=random).bfloat16(),
        "double": torch.randn(2, generator=random).double(),
        "long": torch.tensor(2**62 + 1),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "view one": storage[:10],
        "view two": storage[5:20],  # overlaps with the first
        "the same view": storage[:10],
        "transposed": storage.view(10, 10).t(),
        "channels last": torch.randn(2, 3, 4, 4, generator=random).to(memory_format=torch.channels_last),
        "needs gradient": torch.nn.Parameter(torch.randn(3, generator=random)),
    }
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    writer = CheckpointWriter()
    writer.begin({"model": tensors}, lambda copies: write_checkpoint(tmp_path, 12, copies, {}))
    writer.wait()
    writer.close()
    checkpoint = find_checkpoint(str(tmp_path / "step_00000012"))
    assert find_damage(checkpoint) is None
    loaded = read_tensors(checkpoint)["model"]
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == before[name].dtype
        assert tensor.shape == before[name].shape
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        assert torch.equal(tensor.contiguous().view(width), before[name].contiguous().view(width)), name
    assert torch.equal(storage[:10], before["view one"])  # saving changes nothing


def test_a_step_saved_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3, number=1)
    (tmp_path / "checkpoints" / "step_00000003" / "evaluation.json").write_text("{}")
    again = save(tmp_path, 3, number=2)
    assert weight_of(again) == 2
    assert find_damage(again) is None
    assert names(tmp_path) == ["last", "step_00000003"]
    assert read_metadata(again).items() >= METADATA.items()
    (tmp_path / "new").touch()
    assert {file.stat().st_mode for file in again.iterdir()} == {(tmp_path / "new").stat().st_mode}
    assert not (again / "evaluation.json").exists()  # it was of the replaced weights


@pytest.mark.parametrize("check", [2, 3])
def test_a_process_that_is_taken_over_between_its_check_and_a_rename_publishes_nothing(
    check: int, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    checks = list[bool]()

    def taken_over() -> None:
        checks.append(True)
        if len(checks) == check:  # the process was stopped after this check
            clean_up(tmp_path / "checkpoints")

    with pytest.raises(UserError, match="could not be written"):
        write_checkpoint(tmp_path / "checkpoints", 2, {"model": {}}, {}, taken_over)
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step_00000001"
    assert names(tmp_path) == ["last", "step_00000001", *["step_00000002"] * (check == 3)]


def test_a_run_without_a_whole_checkpoint_has_none(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / ".step_00000001.partial").mkdir(parents=True)
    for where in ("nowhere", ".", "run"):
        assert not has_checkpoint(tmp_path / where)
        with pytest.raises(UserError, match="There is no checkpoint"):
            find_checkpoint(str(tmp_path / where))
    save(tmp_path / "run", 1)
    assert has_checkpoint(tmp_path / "run")


# Damaged files


# tests/faults/test_mutated_files.py changes files at random.
NOT_METADATA = ["", "3", "[]", "null", "{}", '{"sha256": {}}', '{"sha256": 3}', "\udcff", "[" * 100_000]


@pytest.mark.parametrize("content", NOT_METADATA)
def test_metadata_of_another_form_is_damage(content: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    (checkpoint / "state.json").write_bytes(content.encode(errors="surrogateescape"))
    assert find_damage(checkpoint) is not None
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        read_weights(str(tmp_path))


def test_metadata_of_other_files_or_another_step_is_damage(tmp_path: Path) -> None:
    assert "model.safetensors" in str(find_damage(write_checkpoint(tmp_path, 1, {}, METADATA)))
    checkpoint = save(tmp_path, 20)
    state = read_metadata(checkpoint)
    (checkpoint / "state.json").write_text(json.dumps(state | {"step": 21}, indent=2))
    assert "state.json" in str(find_damage(checkpoint))


def test_the_newest_intact_checkpoint_is_found(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in (9, 10, 100)]
    assert find_checkpoint(str(tmp_path)) == saved[2]
    (saved[2] / "model.safetensors").write_bytes(b"")
    assert find_checkpoint(str(tmp_path)) == saved[1]
    (saved[1] / "state.json").unlink()
    assert find_checkpoint(str(tmp_path)) == saved[0]
    (saved[0] / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match=r"None of the 3 checkpoints in .* is intact"):
        find_checkpoint(str(tmp_path))
    assert has_checkpoint(tmp_path)


def test_a_damaged_checkpoint_given_by_its_path_is_refused(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in (1, 2)]
    (saved[1] / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"step_00000002 is damaged: model\.safetensors does not match"):
        find_checkpoint(str(saved[1]))
    with pytest.raises(UserError, match="is damaged"):
        find_checkpoint(str(tmp_path / "checkpoints" / "last"))
    assert find_checkpoint(str(saved[0])) == saved[0]


@pytest.mark.parametrize("name", ["model", "ema"])
def test_damaged_weights_are_not_loaded(name: str, tmp_path: Path) -> None:
    """Of a checkpoint, a file in it, or its run: the checksum of the file that is read is compared."""
    checkpoint = write_checkpoint(tmp_path / "checkpoints", 3, files() | {"ema": {"w": torch.ones(9)}}, {})
    update_link(tmp_path / "checkpoints" / "best", checkpoint)
    file = checkpoint / f"{name}.safetensors"
    sources = [tmp_path, checkpoint, file]
    for source in sources:
        read_weights(str(source), use_ema=name == "ema")
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    for source in sources:
        with pytest.raises(UserError, match=rf"{name}\.safetensors is damaged: .*Copy this checkpoint again"):
            read_weights(str(source), use_ema=name == "ema")
    other = "optimizer" if name == "ema" else "ema"
    assert read_weights(str(checkpoint / f"{other}.safetensors")).tensors


def test_a_missing_best_checkpoint_is_said(tmp_path: Path) -> None:
    saved = [save(tmp_path, step, step) for step in (1, 2)]
    update_link(tmp_path / "checkpoints" / "best", saved[0])
    assert read_weights(str(tmp_path)).messages == []
    shutil.rmtree(saved[0])
    tensors, messages = read_weights(str(tmp_path))
    assert tensors["weight"][0] == 2
    assert len(messages) == 1
    assert "best lacks model.safetensors, so the weights are those of" in messages[0]


# Links, and full disks


def test_last_and_best_are_valid_after_the_run_folder_is_moved(tmp_path: Path) -> None:
    saved = [save(tmp_path / "run", step) for step in (1, 2)]
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "last").resolve() == saved[1]
    update_link(folder / "best", saved[0])
    assert (folder / "best").resolve() == saved[0]
    update_link(folder / "best", saved[1])
    assert (folder / "best").resolve() == saved[1]
    (tmp_path / "run").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "checkpoints" / "best" / "state.json").is_file()
    assert find_checkpoint(str(tmp_path / "moved" / "checkpoints" / "last")).name == "step_00000002"


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in (1, 2, 3, 9, 10)]
    update_link(tmp_path / "checkpoints" / "best", saved[1])
    delete_old_checkpoints(saved[-1], keep=2)
    assert names(tmp_path) == ["best", "last", "step_00000002", "step_00000009", "step_00000010"]
    update_link(tmp_path / "checkpoints" / "best", saved[4])
    for keep in (2, 5):
        delete_old_checkpoints(saved[-1], keep=keep)
        assert names(tmp_path) == ["best", "last", "step_00000009", "step_00000010"]


def test_the_checkpoint_just_saved_is_kept(tmp_path: Path) -> None:
    """After damage a run resumes from an earlier step, so its next checkpoint may not be the highest."""
    damaged = [save(tmp_path, step) for step in (20, 30)]
    for checkpoint in damaged:
        (checkpoint / "model.safetensors").write_bytes(b"")
    save(tmp_path, 10)
    delete_old_checkpoints(save(tmp_path, 15), keep=2)
    assert names(tmp_path) == ["last", "step_00000010", "step_00000015"]
    assert find_checkpoint(str(tmp_path)).name == "step_00000015"


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning_until_it_can(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in (1, 2, 3)]
    (partial := tmp_path / "checkpoints" / ".step_00000009.partial").mkdir()
    # As a file that another host has open: NFS renames it to .nfsXXXX.
    with mounted_disk(saved[0] / "held", "1m"), mounted_disk(partial / "held", "1m"):
        clean_up(tmp_path / "checkpoints")
        for _ in range(2):  # at this rotation, and at the next one
            (warning,) = delete_old_checkpoints(saved[2], keep=2)
            assert re.match(rf"{saved[0]} is not deleted: .*busy", warning)
        assert find_checkpoint(str(tmp_path)) == saved[2]
    assert delete_old_checkpoints(saved[2], keep=2) == []
    clean_up(tmp_path / "checkpoints")
    assert names(tmp_path) == ["last", "step_00000002", "step_00000003"]


@pytest.mark.parametrize("allowed", [1, 2])
def test_a_process_that_has_lost_the_folder_moves_no_link(allowed: int, tmp_path: Path) -> None:
    """It may have lost it while a slow disk made it wait."""
    calls = iter(range(allowed))

    def may_write() -> None:
        if next(calls, None) is None:
            raise UserError("taken over")

    earlier = save(tmp_path, 2)
    with pytest.raises(UserError, match="taken over"):
        write_checkpoint(tmp_path / "checkpoints", 1, {"model": {"weight": torch.zeros(1)}}, {}, may_write)
    assert (tmp_path / "checkpoints" / "last").resolve() == earlier
    assert (tmp_path / "checkpoints" / "step_00000001").exists() == (allowed == 2)


# Either the first tensor file does not fit on the disk, or state.json after it.
@pytest.mark.parametrize("length", [10**6, 200_000], ids=["tensors", "metadata"])
def test_a_full_disk_is_a_user_error_and_earlier_checkpoints_are_intact(length: int, tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "small", "1m") as disk:
        earlier = save(disk, 1)
        tensors = {"model": {"weight": torch.zeros(length)}}
        metadata = {} if length == 10**6 else {"padding": "x" * 2**20}
        with pytest.raises(UserError, match=r"step_00000002 .*No space left .*--resume auto"):
            write_checkpoint(disk / "checkpoints", 2, tensors, metadata)
        assert names(disk) == ["last", "step_00000001"]  # the partial files are deleted
        assert find_checkpoint(str(disk)) == earlier
        assert weight_of(save(disk, 2, number=3)) == 3


# Python announces these before it changes a file or a folder.
_OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}


def save_and_rotate(folder: Path, step: int, number: float) -> None:
    """Save a checkpoint as a run with `--keep-checkpoints 1` does."""
    delete_old_checkpoints(save(folder, step, number), 1)


def save_killed_before(operation: int, folder: Path, step: int, number: float) -> bool:
    """Save in a fork that is killed before its n-th file operation; return whether it was."""
    child = os.fork()
    if not child:
        allowed = iter(range(operation))

        def count(event: str, _: tuple[Any, ...]) -> None:
            if event in _OPERATIONS and next(allowed, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save_and_rotate(folder, step, number)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("step", [20, 30], ids=["the same step again", "the next step"])
def test_a_process_killed_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path, step):
    found = []
    for operation in range(100):
        folder = tmp_path / str(operation)
        save_and_rotate(folder, 20, 1.0)
        killed = save_killed_before(operation, folder, step, 2.0)
        found.append(weight_of(find_checkpoint(str(folder))))
        clean_up(folder / "checkpoints")
        save_and_rotate(folder, 40, 4.0)
        assert names(folder) == ["last", "step_00000040"]
        if not killed:
            break
    assert not killed
    assert len(found) > 15
    assert found == sorted(found)  # first the old one, then the new one
    assert set(found) == {1.0, 2.0}


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(tmp_path: Path) -> None:
    save_and_rotate(tmp_path, 20, 1.0)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000020")
    assert has_checkpoint(tmp_path)
    with pytest.raises(UserError, match="held checkpoints, but none is left"):
        find_checkpoint(str(tmp_path))
