"""The limits of memory, shared memory and open files, and the files from which they are read."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from horovod_volo.doctor.finding import Level
from horovod_volo.doctor.host import (
    assess_memory,
    assess_open_files,
    assess_shared_memory,
    free_memory,
    leftover_findings,
)

MIB, GIB = 2**20, 2**30
GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("free", "ranks", "level"),
    [
        (3 * GIB, 4, "failure"),
        (4 * GIB, 4, "warning"),
        (16 * GIB - 1, 4, "warning"),
        (16 * GIB, 4, "ok"),
    ],
)
def test_memory_is_divided_among_ranks(free: int, ranks: int, level: str) -> None:
    found = assess_memory(free, ranks)
    assert found.level == level
    assert bool(found.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("free", "ranks", "on_gpu", "level"),
    [
        (64 * MIB, 8, False, "ok"),
        (39 * MIB, 8, False, "failure"),
        (64 * MIB, 8, True, "failure"),  # the default of containers
        (256 * MIB, 8, True, "ok"),
        (None, 1, False, "failure"),
    ],
)
def test_shared_memory_must_hold_all_ranks_of_the_host(free, ranks, on_gpu, level) -> None:
    assert assess_shared_memory(free, ranks, on_gpu).level == level


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "level"),
    [
        (1024, 4096, 8, "ok"),
        (1024, 4096, 200, "warning"),
        (1024, 4096, 256, "failure"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10**6, "ok"),
    ],
)
def test_the_required_open_files_grow_with_the_ranks(soft: int, hard: int, ranks: int, level: str) -> None:
    assert assess_open_files((soft, hard), ranks).level == level


def test_a_hard_limit_that_is_too_low_is_named() -> None:
    assert "hard limit, 64," in assess_open_files((64, 64), 1).remedy
    assert "hard limit" not in assess_open_files((64, 4096), 1).remedy
    assert "hard limit" not in assess_open_files((64, resource.RLIM_INFINITY), 1).remedy


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


HOST = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n"}


def test_memory_without_a_cgroup_limit_is_the_hosts(tmp_path: Path) -> None:
    assert free_memory(tree(tmp_path, {**HOST, "proc/self/cgroup": "0::/\n"})) == 8000 * 1024


def test_the_lowest_limit_of_nested_cgroups_applies(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        f"{GROUP}/job/memory.max": "1000000\n",
        f"{GROUP}/job/memory.current": "400000\n",
        f"{GROUP}/job/memory.stat": "anon 1\ninactive_file 100000\n",
        f"{GROUP}/job/step/memory.max": "max\n",
        f"{GROUP}/job/step/memory.current": "7\n",
        f"{GROUP}/job/step/memory.stat": "inactive_file 0\n",
    }
    assert free_memory(tree(tmp_path, HOST | files)) == 700000


def test_cgroups_of_version_1_are_read(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpu:/elsewhere\n4:memory:/job\n0::/\n",
        f"{GROUP}/memory/job/memory.limit_in_bytes": "3000000\n",
        f"{GROUP}/memory/job/memory.usage_in_bytes": "1000000\n",
        f"{GROUP}/memory/job/memory.stat": "cache 1\n",
    }
    assert free_memory(tree(tmp_path, HOST | files)) == 2000000


def test_the_free_memory_of_this_machine_is_read() -> None:
    assert 0 < free_memory() < 2**50


def test_levels_are_words() -> None:
    assert [str(level) for level in Level] == ["failure", "warning", "ok"]


def test_files_that_are_removed_meanwhile_are_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "dev" / "shm"
    shared.mkdir(parents=True)
    (shared / "torch_left").touch()
    (shared / "torch_removed").touch()
    lstat = Path.lstat

    def remove_first(path: Path) -> os.stat_result:
        if path.name == "torch_removed":
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", remove_first)
    (found,) = leftover_findings(tmp_path)
    assert "1 file of PyTorch" in found.text
