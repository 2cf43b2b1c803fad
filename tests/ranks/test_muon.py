"""Muon on several ranks, each of which orthogonalises its share of the matrices, equals Muon on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of
from tests.ranks.test_sharding import files_of, start

OPT = ("--opt", "muon", "--clip-grad", "1")
STEPS = 5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = ranks_of("muon", tmp_path_factory.mktemp("one"), ranks=1, start_with="none")
    return result


@pytest.mark.parametrize(("ranks", "start_with"), [(2, "gloo"), (2, "mpi"), (3, "gloo")])
def test_ranks_equal_one(ranks: int, start_with: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """With odd shapes, with fewer matrices than ranks, for VOLO, and in bf16."""
    found = ranks_of("muon", tmp_path, ranks=ranks, start_with=start_with)
    assert [rank["one_matrix"]["own"] for rank in found] == [1, *([0] * (ranks - 1))]
    for case, expected in alone.items():
        assert expected["moved"] > 1e-2
        assert sum(rank[case]["own"] for rank in found) == len(expected["matrices"])
        for rank in found:
            assert rank[case]["exchanges"] == STEPS  # one message a step
            assert torch.equal(rank[case]["weights"], found[0][case]["weights"])
            difference = (rank[case]["weights"] - expected["weights"]).abs().max()
            assert difference <= (1e-6 if case != "bf16" else 1e-3)
            assert rank[case]["state"].keys() == expected["state"].keys()
            for key, tensor in expected["state"].items():
                assert torch.equal(rank[case]["state"][key], tensor), (case, key)


def test_all_ranks_skip_a_step_that_overflows_on_one(tmp_path: Path) -> None:
    arguments = ("--overflow-on", "1", "--opt", "muon")
    for rank in ranks_of("reducer", tmp_path, *arguments, ranks=2, start_with="gloo"):
        assert rank["moved"] == 0.0
        assert rank["scale"] == 512.0
        assert not any(tensor.any() for tensor in rank["state"].values())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=60, val=20)  # 5 steps of 12 images per epoch
    return folder


def test_a_resumed_run_is_bit_identical_and_another_number_of_ranks_reads_its_state(
    images: Path, tmp_path: Path
) -> None:
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    start(images, through, 2, *OPT, batch=6)
    start(images, stopped, 2, *OPT, "--stop-at-step", "3", batch=6)
    saved = files_of(stopped)
    for name in ("network.2.0.mlp.fc1.weight/momentum_buffer", "head.weight/exp_avg", "head.weight/step"):
        assert saved["optimizer"][name].any()
    for rank in ranks_of("state", tmp_path / "3", str(stopped / "run"), ranks=3, start_with="gloo"):
        for file, tensors in saved.items():
            for key, tensor in tensors.items():
                assert torch.equal(rank[file][key], tensor), (file, key)
    start(images, stopped, 2, *OPT, batch=6)
    expected, found = files_of(through), files_of(stopped)
    assert expected.keys() == found.keys() == {"model", "optimizer", "ema"}
    for file, tensors in expected.items():
        assert tensors.keys() == found[file].keys()
        for key, tensor in tensors.items():
            assert torch.equal(found[file][key], tensor), (file, key)
