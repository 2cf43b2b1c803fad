"""The counted cost of a step: exact for one layer, as the audited figures for VOLO-D1, and held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from horovod_volo.bench.roofline import GPUS, CudaAutocast, count_loop, count_step, usual
from horovod_volo.bench.step_cost import CostMode, StepCost, fused
from horovod_volo.bench.synthetic import CLASSES, bench_config
from horovod_volo.config.schema import Config
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.model_cost import count_cost
from horovod_volo.kernels.network import fused_outlook

H100 = GPUS["h100"]
BATCH = 256


def config_of(model: str, batch: int, drop_path: float) -> Config:
    return bench_config(model=model, batch_size=batch, drop_path=drop_path, precision="bf16")


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


def counted(function: Callable[..., Tensor], *shapes: tuple[int, ...], **named: Any) -> StepCost:
    """Count a function of bf16 tensors, forward and backward."""
    with torch.device("meta"):
        inputs = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        counter = CostMode(nn.Identity())
        with counter.counting() as cost:
            output = function(*inputs, **named)
            torch.autograd.grad(output, inputs, torch.empty_like(output))
    return cost


def test_gradients_are_taken_without_a_copy() -> None:
    """As on a GPU, where nothing but autograd holds them."""
    with torch.device("meta"):
        layer, images = nn.Linear(64, 32), torch.empty(8, 64)
    counter = CostMode(layer)
    with counter.counting() as cost:
        layer(images).sum().backward()
    assert {parameter.grad is not None for parameter in layer.parameters()} == {True}
    assert "clone" not in {operator.name for operator in cost.operators}


def test_backward_of_average_pooling_reads_the_gradient_alone() -> None:
    cost = counted(F.avg_pool2d, (2, 8, 16, 16), kernel_size=2)
    backward = cost.operators[-1]
    assert (backward.name, backward.backward) == ("avg_pool2d_backward", True)
    assert backward.bytes == 2 * 2 * 8 * (8 * 8 + 16 * 16)


def test_batch_norm_reads_its_inputs_twice() -> None:
    """Also if it is fused: sums over the batch come before everything else."""
    shape, size = (4, 8, 32, 32), 2 * 4 * 8 * 32 * 32

    def stem(images: Tensor) -> Tensor:
        return F.relu(F.batch_norm(images, None, None, training=True))

    cost = counted(stem, shape)
    reads = {operator.name: sum(operator.inputs.values()) // size for operator in cost.operators}
    assert reads["native_batch_norm_sums"] == reads["native_batch_norm"] == 1
    assert reads["native_batch_norm_backward_sums"] == reads["native_batch_norm_backward"] == 2
    # Fused, ReLU's forward and BatchNorm's second pass are one kernel, and so are ReLU's backward and the
    # sums of BatchNorm's, which writes the gradient of ReLU for the pass that follows.
    passes = [operator.bytes // size for operator in fused(cost.operators)]
    assert passes == [1, 2, 4, 3]


def test_convolutions_keep_channels_last_memory_as_on_cuda() -> None:
    """Whoever needs it so, need not copy their results."""

    def convolved(images: Tensor, weights: Tensor) -> Tensor:
        given = images.contiguous(memory_format=torch.channels_last)
        return F.conv2d(given, weights).contiguous(memory_format=torch.channels_last)

    cost = counted(convolved, (2, 8, 16, 16), (4, 8, 3, 3))
    forward = [operator.name for operator in cost.operators if not operator.backward]
    assert forward == ["clone", "convolution"]


def test_the_products_of_outlook_attention_are_counted() -> None:
    heads, windows, head_dim = 3, 2 * 4 * 4, 8
    shapes = (2, 8, 8, heads * head_dim), (2, 4, 4, heads * 81)
    cost = counted(lambda values, logits: fused_outlook(values, logits, heads, 1.0)[0], *shapes)
    assert [(operator.name, operator.flops, operator.instructions) for operator in cost.operators] == [
        ("outlook_fused", 2 * windows * heads * 81 * head_dim, 316 * windows * heads),
        ("outlook_fused_backward", 2 * 2 * windows * heads * 81 * head_dim, 664 * windows * heads),
    ]
    assert fused(cost.operators) == cost.operators


def test_the_products_of_a_step_are_three_times_those_of_the_forward(of_d1: StepCost) -> None:
    """Apart from the gradient of the images; attention is in tiles, and computes its weights again."""
    of_attention = [operator for operator in of_d1.operators if "flash" in operator.name]
    products = sum(operator.flops for operator in of_d1.operators) - sum(each.flops for each in of_attention)
    layers, heads, tokens, width = 14, 12, 196, 32
    cost = count_cost(config_of("volo_d1", BATCH, 0.1), Classification(), CLASSES)
    expected = cost.forward_flops - layers * heads * 2 * 2 * tokens**2 * width
    assert products == pytest.approx(3 * expected * BATCH, rel=0.05)
    assert len(of_attention) == 2 * layers
    tiles = 2 * BATCH * heads * 256**2 * width  # 196 tokens fill two tiles of 128
    assert {operator.flops for operator in of_attention} == {2 * tiles, 5 * tiles}


def test_all_products_of_a_step_in_bf16_are_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's autocast, which is emulated, leaves none in fp32."""
    dtypes: dict[str, set[torch.dtype]] = {}

    class Watching(CostMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._overloadpacket in flop_registry:
                found = {leaf.dtype for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)}
                dtypes.setdefault(func.__name__, set()).update(found - {torch.uint64})
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr("horovod_volo.bench.roofline.CostMode", Watching)
    count_step(config_of("volo_demo", 4, 0.1))
    count_step(config_of("lvvit_t", 4, 0.1))
    flash = {name for name in dtypes if "flash" in name}
    assert len(flash) == 2  # its logarithms of sums are in fp32
    assert {name: found for name, found in dtypes.items() if name not in flash} == {
        name: {torch.bfloat16} for name in dtypes if name not in flash
    }


def test_the_floor_does_not_rise_unnoticed(of_d1: StepCost) -> None:
    """A change that costs a GPU time or memory raises a number here, and says why."""
    compiled = StepCost(fused(of_d1.operators))
    assert 1e3 * of_d1.seconds(H100) < 65
    assert 1e3 * compiled.seconds(H100) < 48
    assert 1e3 * compiled.seconds(usual(H100)) < 61.5
    assert of_d1.kernels < 1_600
    assert compiled.kernels < 600
    assert of_d1.saved_bytes < 16.2 * 2**30


def test_timms_step_is_counted_the_same_way() -> None:
    """Its unfold launches one kernel for each image; fusing it saves time."""
    config = config_of("volo_d1", BATCH, 0.1)
    eager, compiled = count_loop("eager", config), count_loop("compile", config)
    assert sum(operator.kernels for operator in eager.operators if "2col" in operator.name) >= 4 * BATCH
    assert compiled.seconds(H100) < 0.8 * eager.seconds(H100)
    assert compiled.saved_bytes == eager.saved_bytes
