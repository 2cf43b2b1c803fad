"""The counted cost of a step: exact for one layer, as the audited figures for VOLO-D1, and held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from horovod_volo.bench.machine.cuda_autocast import CudaAutocast
from horovod_volo.bench.machine.roofline import GPUS, count_loop, count_step
from horovod_volo.bench.machine.step import TRAIN_GFLOP
from horovod_volo.bench.machine.step_cost import CostMode, StepCost, fused
from horovod_volo.bench.synthetic import RANDOM_LABELS, checked_config
from horovod_volo.config.schema import Config

H100 = GPUS["h100"]
BATCH = 256


def config_of(model: str, batch: int, drop_path: float) -> Config:
    settings = {"model": model, "batch_size": batch, "drop_path": drop_path, "precision": "bf16"}
    return checked_config(settings | {"num_classes": 1000} | RANDOM_LABELS)


@pytest.fixture(scope="module")
def of_d1() -> StepCost:
    return count_step(config_of("volo_d1", BATCH, 0.1))


def test_a_linear_layer_costs_its_products_and_its_bytes() -> None:
    with torch.device("meta"):
        layer = nn.Linear(64, 32, bias=False)
        images = torch.empty(8, 64, requires_grad=True)
    counter = CostMode(layer)
    with counter.counting() as cost:
        with CudaAutocast():
            result = layer(images)
        result.backward(torch.empty_like(result))
    assert [operator.name for operator in cost.operators if operator.flops] == ["mm"] * 3
    assert {operator.flops for operator in cost.operators if operator.flops} == {2 * 8 * 64 * 32}
    forward = next(operator for operator in cost.operators if operator.flops)
    assert forward.bytes == 2 * (8 * 64 + 64 * 32 + 8 * 32)  # in bf16
    # Both inputs are cast to bf16, and their gradients back to fp32.
    casts = [operator for operator in cost.operators if operator.name == "_to_copy"]
    assert [operator.bytes for operator in casts] == [6 * 8 * 64, 6 * 64 * 32, 6 * 64 * 32, 6 * 8 * 64][
        : len(casts)
    ]
    assert [operator.backward for operator in casts] == [False, False, True, True]
    assert cost.saved_bytes == 2 * (8 * 64 + 64 * 32)


def test_neighbours_are_fused_and_their_results_stay_in_registers() -> None:
    with torch.device("meta"):
        layer, images = nn.Identity(), torch.empty(1000)
    counter = CostMode(layer)
    with counter.counting() as cost:
        F.relu(layer(images) * 2 + 1).sum()
    assert [operator.name for operator in cost.operators] == ["mul", "add", "relu", "sum"]
    (kernel,) = fused(cost.operators)
    assert (cost.kernels, kernel.kernels) == (4, 1)
    assert kernel.bytes == 4 * 1000 + 4


def test_the_products_of_a_step_are_those_of_the_table(of_d1: StepCost) -> None:
    """Apart from the branches that drop path leaves out, and the gradient of the images."""
    products = sum(operator.flops for operator in of_d1.operators)
    assert products == pytest.approx(1e9 * TRAIN_GFLOP["volo_d1", 224] * BATCH, rel=0.05)


def test_all_products_of_a_step_in_bf16_are_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's autocast, which is emulated, leaves none in fp32."""
    dtypes: dict[str, set[torch.dtype]] = {}

    class Watching(CostMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._overloadpacket in flop_registry:
                found = {leaf.dtype for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)}
                dtypes.setdefault(func.__name__, set()).update(found - {torch.uint64})
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr("horovod_volo.bench.machine.roofline.CostMode", Watching)
    count_step(config_of("volo_demo", 4, 0.1))
    count_step(config_of("lvvit_t", 4, 0.1))
    flash = {name for name in dtypes if "flash" in name}
    assert len(flash) == 2  # its logarithms of sums are in fp32
    assert {name: found for name, found in dtypes.items() if name not in flash} == {
        name: {torch.bfloat16} for name in dtypes if name not in flash
    }


def test_the_floor_does_not_rise_unnoticed(of_d1: StepCost) -> None:
    """A change that costs a GPU time or memory raises a number here, and says why."""
    assert 1e3 * of_d1.seconds(H100) < 51.3
    assert of_d1.kernels < 2_920
    assert of_d1.saved_bytes < 15.0 * 2**30


def test_timms_step_is_counted_the_same_way() -> None:
    """Its unfold launches one kernel for each image; fusing it saves time."""
    config = config_of("volo_d1", BATCH, 0.1)
    eager, compiled = count_loop("eager", config), count_loop("compile", config)
    assert sum(operator.kernels for operator in eager.operators if "2col" in operator.name) >= 4 * BATCH
    assert compiled.seconds(H100) < 0.8 * eager.seconds(H100)
    assert compiled.saved_bytes == eager.saved_bytes
