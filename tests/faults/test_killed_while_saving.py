"""A process killed before any file operation of a save leaves a whole checkpoint to resume from."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_volo.core.errors import UserError
from horovod_volo.engine.checkpoint.files import (
    clean_up,
    delete_old_checkpoints,
    find_checkpoint,
    has_checkpoint,
    read_tensors,
    write_checkpoint,
)

# Python announces these before it changes a file or a folder.
_OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}


def save(folder: Path, step: int, number: float) -> None:
    """Save a checkpoint as a run with `--keep-checkpoints 1` does."""
    files = {"model": {"weight": torch.full((9,), number)}}
    saved = write_checkpoint(folder / "checkpoints", step, files, {})
    delete_old_checkpoints(saved, 1)


def save_killed_before(operation: int, folder: Path, step: int, number: float) -> bool:
    """Save in a fork that is killed before its n-th file operation; return whether it was."""
    child = os.fork()
    if not child:
        left = operation

        def count(event: str, _: tuple[Any, ...]) -> None:
            nonlocal left
            if event in _OPERATIONS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save(folder, step, number)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("step", [20, 30], ids=["the same step again", "the next step"])
def test_nothing_whole_is_removed_before_its_successor_is_published(tmp_path, step):
    found = []
    for operation in range(100):
        folder = tmp_path / str(operation)
        save(folder, 20, 1.0)
        killed = save_killed_before(operation, folder, step, 2.0)
        found.append(float(read_tensors(find_checkpoint(str(folder)))["model"]["weight"][0]))
        clean_up(folder / "checkpoints")
        save(folder, 40, 4.0)
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["last", "step_00000040"]
        if not killed:
            break
    assert not killed
    assert len(found) > 15
    assert found == sorted(found)  # first the old one, then the new one
    assert set(found) == {1.0, 2.0}


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(tmp_path):
    save(tmp_path, 20, 1.0)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000020")
    assert has_checkpoint(tmp_path)
    with pytest.raises(UserError, match="held checkpoints, but none is left"):
        find_checkpoint(str(tmp_path))
