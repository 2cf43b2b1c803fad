"""Operations of a network."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horovod_volo.config.recipe import assemble
from horovod_volo.core.errors import UserError
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.model_cost import PASSES, count_cost, refuse_long_run
from horovod_volo.engine.task import Network
from horovod_volo.monitor.meters import peak_flops


@pytest.mark.parametrize(("model", "side", "gflop"), [("volo_d1", 224, 41.5), ("volo_d5", 512, 2547.0)])
def test_forward_and_backward_take_what_was_counted_layer_by_layer(model, side, gflop):
    config = assemble({"model": model, "img_size": side, "token_label": True}, fallback_name="")
    before = torch.get_rng_state()
    cost = count_cost(config, TASKS.find("classification"), 1000)
    assert torch.equal(torch.get_rng_state(), before)
    assert 1e-9 * PASSES * cost.forward_flops == pytest.approx(gflop, rel=0.01)


class ComputedOnHost(torch.nn.Sequential):
    """A network, as of a plugin, whose forward needs the values of its activations."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * float(super().forward(images).sum())


def test_operations_that_cannot_be_counted_are_not_invented() -> None:
    """A run does not need them."""
    network = ComputedOnHost(torch.nn.Conv2d(3, 3, 1))
    task: Any = SimpleNamespace(build=lambda *_: Network(network, (), network, lambda _: []))
    cost = count_cost(assemble({}, fallback_name=""), task, 3)
    assert (cost.forward_flops, bool(cost.problem)) == (0.0, True)


@pytest.mark.parametrize(
    ("changes", "images", "refused"),
    [
        ({"batch_size": 4}, 1_281_167, True),  # days
        ({"epochs": 1}, 128, True),  # a step of a minute
        ({"fit_head": True, "epochs": 0, "cooldown_epochs": 0}, 1_281_167, True),  # features
        ({"batch_size": 4}, 40, False),
        ({"batch_size": 4, "stop_at_step": 9}, 1_281_167, False),
    ],
)
def test_a_long_run_on_a_cpu_is_refused(changes: dict[str, Any], images: int, refused: bool) -> None:
    config = assemble({"model": "volo_d1"} | changes, fallback_name="")
    cost = count_cost(config, TASKS.find("classification"), 1000)
    with pytest.raises(UserError, match="--device cpu") if refused else nullcontext():
        refuse_long_run(config, cost, 1, 2, images)


def test_peaks_are_those_of_known_gpus() -> None:
    expected = {("NVIDIA H100 PCIe", "fp16"): 756, ("NVIDIA A100-SXM4-40GB", "tf32"): 156}
    expected |= {("Tesla V100-SXM2-16GB", "fp16"): 125, ("Tesla V100-SXM2-16GB", "bf16"): 0}
    expected |= {("NVIDIA A1000", "bf16"): 0, ("NVIDIA GeForce RTX 4090 D", "bf16"): 0}
    for (gpu, precision), tflops in expected.items():
        assert peak_flops(gpu, precision) == tflops * 1e12, gpu
