"""A run uses the kernels that pass a check on its GPU, or here on the CPU in the interpreter of Triton."""

from collections.abc import Callable

import pytest
import test_images
import test_network_kernels
import torch
from kernel_process import run_in_interpreter, skip_elsewhere
from torch import nn

from horovod_volo.bench.synthetic import bench_config
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core import operators
from horovod_volo.core.operators import OPERATORS, describe_kernels
from horovod_volo.kernels import augment
from horovod_volo.kernels import choice as kernel_choice
from horovod_volo.kernels import network as network_operators
from horovod_volo.kernels.choice import choose_by_check, find_problem, kernel_checks
from horovod_volo.models.build import build_model


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
        monkeypatch.setattr(operators, "_DEVICES", ("cpu",))
        monkeypatch.setattr(augment, "_BLOCK", 2**13)
    monkeypatch.setattr(operators, "_used", set())


@pytest.mark.usefixtures("_all_on_this_device")
def test_right_kernels_are_used(config: Config, network: nn.Module, device: torch.device) -> None:
    checks = list(kernel_checks(config, network.to(device), 5, device))
    assert tuple(check.kernel for check in checks) == OPERATORS
    for check in checks:
        assert not find_problem(check), check.kernel
        assert operators._used == {check.kernel}


def wrong(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("does not compile\nbecause of line 7")


@pytest.mark.usefixtures("_all_on_this_device")
@pytest.mark.parametrize("planted", ["fails", "differs"])
def test_wrong_kernels_are_not_used(planted, config, network, device, monkeypatch) -> None:
    compute: Callable[..., tuple[torch.Tensor, ...]] = network_operators.loss_with_lse
    write = network_operators.write_gradient
    if planted == "fails":
        monkeypatch.setitem(operators._kernels, "loss", (wrong, write))
        expected = "loss is computed by PyTorch's operators: its kernel fails: RuntimeError: does not compile"
    else:
        differing = lambda *inputs: tuple(1.01 * result for result in compute(*inputs))  # noqa: E731
        monkeypatch.setitem(operators._kernels, "loss", (differing, write))
        expected = "loss is computed by PyTorch's operators: its kernel gives results that differ by 0.0"
    every = kernel_checks(config, network.to(device), 5, device)
    checks = [check for check in every if check.kernel == "loss"]
    monkeypatch.setattr(kernel_choice, "kernel_checks", lambda *_: checks)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    as_gpu = torch.device("cuda")
    (warning,) = choose_by_check(as_gpu, config, network, 5, World.single())
    assert expected in warning
    assert describe_kernels() == "PyTorch's own"


def test_kernels_and_checks_in_the_interpreter() -> None:
    files = [__file__, test_images.__file__, test_network_kernels.__file__]
    tests = 3 + test_images.KERNELS_CASES + test_network_kernels.CASES
    run_in_interpreter(files, tests, "cpu and (not test_images or kernels_equal or plugins or normalizing)")
