"""The doctor's checks between ranks: clocks, code, versions, settings, allreduce speed, shared folder."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from horovod_volo.cluster.world import World
from horovod_volo.core.environment import code_hashes
from horovod_volo.doctor.consistency import (
    assess_clock,
    clock_difference,
    compare_code,
    compare_settings,
    compare_versions,
)
from horovod_volo.doctor.network import AllreduceSpeed, assess_allreduce, list_interfaces
from horovod_volo.doctor.shared_folder import assess_times, check_shared_folder


def test_two_messages_bound_the_difference_of_clocks() -> None:
    # Times by a's clock: in the first round a sends at 10.0 and b at 10.3, they receive at 10.4 and 10.5; in
    # the second round at 20.1, 20.0, 20.2 and 20.2. b's clock is 5 s ahead.
    a = [(10.0, 10.4), (20.1, 20.2)]
    b = [(15.3, 15.5), (25.0, 25.2)]
    ahead, uncertain = clock_difference(b, a)
    assert ahead - uncertain == pytest.approx(4.9)  # b sent at 15.3 before a had received at 10.4
    assert ahead + uncertain == pytest.approx(5.1)  # b had received at 25.2 after a sent at 20.1
    assert clock_difference(a, b) == pytest.approx((-5.0, 0.1))


@pytest.mark.parametrize(
    ("ahead", "uncertain", "level", "message"),
    [
        (0.9, 0.01, "ok", "within 1 s"),
        (1.2, 0.3, "ok", "within 1 s"),  # possibly less than 1 s
        (1.2, 0.1, "warning", "1.20 s ahead of rank 0's"),
        (-90.0, 0.1, "warning", "90.00 s behind rank 0's"),
    ],
)
def test_a_clock_is_assessed_by_its_least_possible_difference(
    ahead: float, uncertain: float, level: str, message: str
) -> None:
    found = assess_clock(ahead, uncertain)
    assert found.level == level
    assert message in found.text


@pytest.mark.parametrize(
    ("speed", "line", "level", "message"),
    [
        (AllreduceSpeed(0.004, 2.4e8, correct=True), 0, "ok", "4.0 ms for 4 bytes, 240 MB/s for 16 MiB"),
        (AllreduceSpeed(0.004, 1.1e8, correct=True), 1000, "ok", "110 MB/s"),
        (
            AllreduceSpeed(0.004, 1.1e8, correct=True),
            100_000,
            "warning",
            "less than 5% of the interfaces' 12.5 GB/s",
        ),
        (AllreduceSpeed(0.004, 2.0e7, correct=True), 0, "warning", "a gigabit line"),
        (
            AllreduceSpeed(0.031, 2.4e8, correct=True),
            0,
            "warning",
            "with a cycle time of 1 ms, less than 30 ms",
        ),
        (AllreduceSpeed(0.004, 2.4e8, correct=False), 0, "failure", "sums over all ranks are wrong"),
    ],
)
def test_allreduce_is_assessed_by_interface_and_cycle_time(
    speed: AllreduceSpeed, line: int, level: str, message: str
) -> None:
    (found,) = assess_allreduce(speed, line, 0.001, "CPUs")
    assert found.level == level
    assert message in found.text
    assert bool(found.remedy) == (level != "ok")


def test_the_interfaces_of_this_host_are_listed() -> None:
    interfaces = {one.name: one for one in list_interfaces()}
    assert set(interfaces) <= {name for _, name in socket.if_nameindex()} - {"lo"}
    assert set(interfaces) >= {name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))}
    for address in filter(None, (one.address for one in interfaces.values() if one.up)):
        with socket.socket() as listening:
            listening.bind((address, 0))  # fails for an address of another host


def test_differences_from_rank_0_are_named() -> None:
    first = {"python": "3.11.7", "torch": "2.13.0", "timm": "1.0.31"}
    assert compare_versions(first, first).level == "ok"
    found = compare_versions({**first, "torch": "2.12.0"}, first)
    assert found.level == "failure"
    assert found.text == "torch 2.12.0, rank 0 has 2.13.0"

    code = {"a.py": "1", "b.py": "2"}
    assert compare_code(code, code).level == "ok"
    assert compare_code({"a.py": "1"}, code).text == "differs from rank 0's: b.py"
    assert (
        compare_code({"a.py": "9", "b.py": "2", "c.py": "3"}, code).text
        == "differs from rank 0's: a.py and 1 more"
    )

    assert compare_settings({}, {}).level == "ok"
    found = compare_settings({}, {"HOROVOD_CACHE_CAPACITY": "0"})
    assert found.level == "failure"
    assert found.text == "HOROVOD_CACHE_CAPACITY is not set, on rank 0 0"


def test_code_and_recipes_are_hashed(tmp_path: Path) -> None:
    for name in ("a.py", "deep/b.toml", "deep/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("same")
    before = code_hashes(tmp_path)
    assert list(before) == ["a.py", "deep/b.toml"]
    (tmp_path / "deep/b.toml").write_text("sane")
    changed = code_hashes(tmp_path)
    assert changed["a.py"] == before["a.py"]
    assert changed["deep/b.toml"] != before["deep/b.toml"]


def test_a_slow_folder_is_a_warning() -> None:
    assert assess_times(Path("runs"), 0.9, 0.9, 2).level == "ok"
    assert "others" not in assess_times(Path("runs"), 0.01, 0.0, 1).text
    assert assess_times(Path("runs"), 1.5, 0.0, 2).level == "warning"
    assert assess_times(Path("runs"), 0.1, 1.5, 2).level == "warning"


def test_the_check_leaves_the_folder_unchanged(tmp_path: Path) -> None:
    world = World.single()
    (found,) = check_shared_folder(tmp_path / "new" / "runs", world)
    assert found.level == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "existing").mkdir()
    (tmp_path / "file").write_text("not a folder")
    check_shared_folder(tmp_path / "existing", world)
    assert list((tmp_path / "existing").iterdir()) == []
    (found,) = check_shared_folder(tmp_path / "file" / "runs", world)
    assert found.level == "failure"
    assert "cannot write there" in found.text
