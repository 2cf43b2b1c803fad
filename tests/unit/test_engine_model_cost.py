"""Parameters and operations of a network by block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from horovod_volo.config.recipe import assemble
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.model_cost import PASSES, block_of, count_cost
from horovod_volo.engine.task import Network
from horovod_volo.monitor.meters import peak_flops


def test_the_cost_of_a_network_is_that_of_its_blocks() -> None:
    settings = {"model": "volo_demo", "img_size": 64, "num_classes": 10, "token_label": True}
    config = assemble(settings, fallback_name="")
    before = torch.get_rng_state()
    cost = count_cost(config, TASKS.find("classification"), 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(block.parameters for block in cost.blocks) == 533_606
    by_name = {block.name: block for block in cost.blocks}
    # (16 tokens x 96 channels) times (96 x 10 classes), at two operations
    assert by_name["aux_head"].flops == 2 * 16 * 96 * 10
    assert by_name["pos_embed"].kind == ""
    assert "network.0.0" in by_name
    assert block_of("layers.0.blocks.1.attn.qkv.weight") == "layers.0.blocks.1"  # as Swin's
    assert sum(block.flops for block in cost.blocks) == pytest.approx(cost.forward_flops, rel=0.01)


@pytest.mark.parametrize(
    ("model", "side", "gflop"),
    [("volo_d1", 224, 41.5), ("volo_d5", 512, 2547.0)],
)
def test_forward_and_backward_take_what_was_counted_layer_by_layer(
    model: str, side: int, gflop: float
) -> None:
    config = assemble({"model": model, "img_size": side, "token_label": True}, fallback_name="")
    cost = count_cost(config, TASKS.find("classification"), 1000)
    assert 1e-9 * PASSES * cost.forward_flops == pytest.approx(gflop, rel=0.01)


class ComputedOnHost(torch.nn.Sequential):
    """A network whose forward needs the values of its activations."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * float(super().forward(images).sum())


class BuiltOnHost(torch.nn.Linear):
    """A network whose constructor needs the values of a tensor, as those of many published models do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.drop_path = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


class UnknownNetwork:
    """The part of a task that builds the network of a plugin."""

    def __init__(self, build: Callable[[], torch.nn.Module]) -> None:
        self._build = build

    def build(self, *_: object) -> Network:
        network = self._build()
        return Network(network, (), network, lambda _: [])


@pytest.mark.parametrize(
    ("build", "parameters"),
    [(lambda: ComputedOnHost(torch.nn.Conv2d(3, 3, 1)), 12), (lambda: BuiltOnHost(3, 3), 0)],
)
def test_operations_that_cannot_be_counted_are_not_invented(
    build: Callable[[], torch.nn.Module], parameters: int
) -> None:
    """A run does not need them."""
    cost = count_cost(assemble({}, fallback_name=""), UnknownNetwork(build), 3)  # type: ignore[arg-type]
    assert (cost.forward_flops, sum(block.parameters for block in cost.blocks)) == (0.0, parameters)
    assert [block.flops for block in cost.blocks] == [0.0] * len(cost.blocks)
    assert cost.problem


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", 0),
        ("NVIDIA A1000", "bf16", 0),
        ("NVIDIA GeForce RTX 4090 D", "bf16", 0),
    ],
)
def test_peaks_are_those_of_known_gpus(gpu: str, precision: str, tflops: float) -> None:
    assert peak_flops(gpu, precision) == tflops * 1e12
