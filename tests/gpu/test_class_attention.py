"""The Triton kernels of class attention against PyTorch's operators.

On the CPU they run in Triton's interpreter, which must be enabled before Triton is first imported: the last
test here starts a separate process for these cases.
"""

from __future__ import annotations

import pytest
import torch
from kernel_process import check_compiled, run_in_interpreter, skip_elsewhere
from torch import Tensor

from horovod_volo.kernels.class_attention import class_attention

# Batch, tokens, heads and width of a head: those of D1 and D5, one that fills no block, and one token.
SHAPES = [(2, 196, 2, 32), (1, 196, 2, 48), (3, 65, 3, 5), (2, 1, 1, 16)]
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # with the tolerance, of the largest value
CASES = len(SHAPES) * len(DTYPES)  # number of tests on one device
SCALE = 0.3


def by_torch(query: Tensor, own: Tensor, others: Tensor, heads: int) -> Tensor:
    """Compute attention as timm does, over the class token and the tokens."""
    joint = torch.cat([own, others], dim=1)  # (batch, 1 + tokens, 2 x channels)
    keys, values = joint.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    queries = query.unflatten(2, (heads, -1)).transpose(1, 2) * SCALE
    attended = (queries @ keys.mT).softmax(dim=-1) @ values  # (batch, heads, 1, width)
    return attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_and_gradients_equal_torchs(
    device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    skip_elsewhere(device)
    batch, tokens, heads, width = shape
    random, channels = torch.Generator().manual_seed(sum(shape)), heads * width
    shapes = [(batch, 1, channels), (batch, 1, 2 * channels), (batch, tokens, 2 * channels)]
    inputs = [torch.randn(each, generator=random).to(device, dtype) for each in shapes]
    gradient = torch.randn(shapes[0], generator=random).to(device, dtype)
    ours = [value.clone().requires_grad_() for value in inputs]
    exact = [value.double().requires_grad_() for value in inputs]
    result, _ = class_attention(*ours, heads, SCALE)
    expected = by_torch(*exact, heads)
    assert result.dtype == dtype
    found = torch.autograd.grad(result, ours, gradient)
    right = torch.autograd.grad(expected, exact, gradient.double())
    for number, (one, other) in enumerate(zip((result, *found), (expected, *right), strict=True)):
        difference = (one.double() - other).abs().max()
        assert difference <= DTYPES[dtype] * other.abs().max(), (number, float(difference))


def test_the_kernels_compile_without_spilling() -> None:
    check_compiled("class_attention", 4)


def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, CASES)
