"""A run uses the kernels that pass a check on its GPU, or here on the CPU in the interpreter of Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_process import run_in_interpreter, skip_elsewhere
from torch import nn

from horovod_volo import kernels
from horovod_volo.bench.synthetic import bench_config
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.kernels import KERNELS, augment, describe_kernels, soft_cross_entropy
from horovod_volo.kernels import choice as kernel_choice
from horovod_volo.kernels.choice import choose_kernels, kernel_checks, outcome
from horovod_volo.models.build import build_model

SECONDS = {True: 1.0, False: 2.5}  # of a check, with its kernel and without


@pytest.fixture
def config() -> Config:
    return bench_config(model="volo_demo", img_size=32, batch_size=2, num_classes=0)


@pytest.fixture
def network() -> nn.Module:
    return build_model("volo_demo", img_size=32, num_classes=5, drop_path=0.0)


@pytest.fixture
def _all_on_this_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Let the CPU take the place of a GPU, as fast as one."""
    skip_elsewhere(device)
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "_DEVICES", ("cpu",))
        monkeypatch.setattr(kernel_choice, "_seconds", lambda _: SECONDS[bool(kernels._used)])
        monkeypatch.setattr(augment, "_BLOCK", 2**13)
    monkeypatch.setattr(kernels, "_used", {})


@pytest.mark.usefixtures("_all_on_this_device")
def test_right_kernels_are_used(config: Config, network: nn.Module, device: torch.device) -> None:
    checks = list(kernel_checks(config, network.to(device), 5, device))
    assert tuple(check.kernel for check in checks) == KERNELS
    for check in checks:
        speed, problem = outcome(check)
        assert not problem, (check.kernel, problem)
        assert speed >= 1
        assert list(kernels._used) == [check.kernel]


def wrong(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("does not compile\nbecause of line 7")


@pytest.mark.usefixtures("_all_on_this_device")
@pytest.mark.parametrize("planted", ["fails", "differs", "is slower"])
def test_wrong_kernels_are_not_used_and_slow_ones_are_named(
    planted: str,
    config: Config,
    network: nn.Module,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator: Callable[..., tuple[torch.Tensor, ...]] = soft_cross_entropy.loss_with_lse
    if planted == "fails":
        monkeypatch.setattr("horovod_volo.objective.sparse_cross_entropy.loss_with_lse", wrong)
        expected = "loss is computed by PyTorch's operators: its kernel fails: RuntimeError: does not compile"
    elif planted == "differs":
        monkeypatch.setattr(
            "horovod_volo.objective.sparse_cross_entropy.loss_with_lse",
            lambda *inputs: tuple(1.01 * result for result in operator(*inputs)),
        )
        expected = "loss is computed by PyTorch's operators: its kernel gives results that differ by 0.0"
    else:
        monkeypatch.setattr(kernel_choice, "_seconds", lambda _: 2.0 if "loss" in kernels._used else 1.0)
        expected = (
            "loss: PyTorch's operators are 2.00 times as fast as its kernel; --kernels plain uses these"
        )
    checks = [
        check for check in kernel_checks(config, network.to(device), 5, device) if check.kernel == "loss"
    ]
    monkeypatch.setattr(kernel_choice, "kernel_checks", lambda *_: checks)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    as_gpu = torch.device("cuda")
    (warning,) = choose_kernels(config, network, 5, as_gpu, World.single())
    assert expected in warning
    assert describe_kernels() == ("loss (0.5 x PyTorch)" if planted == "is slower" else "PyTorch's own")


def test_the_checks_in_the_interpreter() -> None:
    run_in_interpreter(__file__, 4)
