"""The Triton kernels of BatchNorm and ReLU against PyTorch's, with the statistics that they update.

On the CPU they run in Triton's interpreter, which must be enabled before Triton is first imported: the last
test here starts a separate process for these cases.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_process import INTERPRETED, check_compiled, run_in_interpreter, skip_elsewhere
from torch import Tensor, nn

from horovod_volo import kernels
from horovod_volo.kernels import batch_norm
from horovod_volo.models.batch_norm import BatchNormReLU, merge_relus

if INTERPRETED:
    batch_norm._PROGRAMS = 5  # fewer, because the interpreter runs them one after the other
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # with the tolerance, of the largest value
SHAPES = [(3, 16, 9, 11), (4, 6, 20, 20), (2, 64, 12, 12), (1, 3, 2, 3)]
CASES = len(DTYPES) * len(SHAPES) + 3  # number of tests on one device


@pytest.fixture
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels on the CPU too."""
    monkeypatch.setattr(kernels, "_DEVICES", ("cpu", "cuda"))


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw images whose channels have different means and scales, and a gradient."""
    random = torch.Generator().manual_seed(sum(shape))
    images, gradient = torch.randn(2, *shape, generator=random)
    channels = torch.arange(1.0, shape[1] + 1).view(-1, 1, 1)
    return (images * channels + 5 * channels).to(device, dtype), gradient.to(device, dtype)


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_gradients_and_statistics_equal_torchs(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    skip_elsewhere(device)
    images, gradient = drawn(shape, dtype, device)
    ours, exact = BatchNormReLU(shape[1]).to(device), nn.BatchNorm2d(shape[1]).double().to(device)
    for norm in (ours, exact):
        norm.weight.data.copy_(torch.linspace(-1, 2, shape[1]))
        norm.bias.data.copy_(torch.linspace(-0.5, 0.5, shape[1]))
    leaf, exact_leaf = images.clone().requires_grad_(), images.double().requires_grad_()
    result, expected = ours(leaf), F.relu(exact(exact_leaf))
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert 0 < (result > 0).float().mean() < 1
    found = torch.autograd.grad(result, [leaf, *ours.parameters()], gradient)
    right = torch.autograd.grad(expected, [exact_leaf, *exact.parameters()], gradient.double())
    statistics = (ours.running_mean, ours.running_var), (exact.running_mean, exact.running_var)
    for number, (one, other) in enumerate(
        zip((result, *found, *statistics[0]), (expected, *right, *statistics[1]), strict=True)
    ):
        assert one is not None
        assert other is not None
        difference = (one.double() - other).abs().max()
        assert difference <= DTYPES[dtype] * other.abs().max(), (number, float(difference))
    assert ours.num_batches_tracked == 1


@pytest.mark.usefixtures("_fused")
def test_gradients_are_deterministic(device: torch.device) -> None:
    skip_elsewhere(device)
    images, gradient = drawn((3, 8, 30, 30), torch.float32, device)
    norm = BatchNormReLU(8).to(device)
    leaves = [images.requires_grad_(), *norm.parameters()]
    runs = [torch.autograd.grad(norm(images), leaves, gradient) for _ in range(3)]
    assert all(torch.equal(one, first) for run in runs for one, first in zip(run, runs[0], strict=True))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.usefixtures("_fused")
def test_what_is_not_a_number_is_not_hidden(device: torch.device) -> None:
    """An overflow in the stem is seen by the loss scaler, and not turned into zeros by ReLU."""
    skip_elsewhere(device)
    images, _ = drawn((2, 4, 3, 3), torch.float32, device)
    images[0, 1, 2, 2] = torch.inf
    assert BatchNormReLU(4).to(device)(images)[:, 1].isnan().all()


@pytest.mark.usefixtures("_fused")
def test_large_means_do_not_cancel(device: torch.device) -> None:
    skip_elsewhere(device)
    images = 1000 + torch.randn(4, 2, 40, 40, generator=torch.Generator().manual_seed(3)).to(device)
    norm = BatchNormReLU(2).to(device)
    norm(images)
    assert norm.running_var is not None
    variance = images.double().var(dim=(0, 2, 3))
    torch.testing.assert_close(norm.running_var.double(), 0.9 + 0.1 * variance, rtol=1e-4, atol=0)


def test_a_stem_is_the_same_with_merged_relus() -> None:
    """Its names, its results in training and in evaluation, and its gradients, bit for bit."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1))
    merged = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1))
    merge_relus(merged)
    assert isinstance(merged[1], BatchNormReLU)
    assert list(merged.state_dict()) == list(layers.state_dict())
    merged.load_state_dict(layers.state_dict())
    images = torch.randn(2, 3, 8, 8)
    outputs = [stem(images) for stem in (layers, merged)]
    assert torch.equal(*outputs)
    gradients = [
        torch.autograd.grad(output.square().sum(), list(stem.parameters()))
        for output, stem in zip(outputs, (layers, merged), strict=True)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert torch.equal(layers.eval()(images), merged.eval()(images))


def test_the_kernels_compile_without_spilling() -> None:
    check_compiled("batch_norm", 9)


def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, CASES)
