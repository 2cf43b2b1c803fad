"""The Triton kernel of GELU's backward, in an MLP, against PyTorch's operators.

On the CPU it runs in Triton's interpreter, which must be enabled before Triton is first imported: the last
test here starts a separate process for these cases.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_process import INTERPRETED, check_compiled, run_in_interpreter, skip_elsewhere
from torch import Tensor

from horovod_volo.kernels import gelu
from horovod_volo.kernels.gelu import gelu_linear

if INTERPRETED:  # fewer programs with larger tiles, because they run one after the other
    gelu._PROGRAMS, gelu._TILE = 2, 64
# Tokens (batch, ...), channels and hidden channels: those of D1, D5, and one of no block size.
SHAPES = [(2, 7, 384, 1152), (1, 3, 5, 192, 576), (150, 48, 100)]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # with the tolerance, of the largest value
CASES = len(SHAPES) * len(DTYPES) + 1  # number of tests on one device


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Draw tokens, the weight and bias of both layers, and a gradient."""
    *tokens, channels, hidden = shape
    random = torch.Generator().manual_seed(sum(shape))
    shapes = [(*tokens, channels), (hidden, channels), (hidden,), (channels, hidden), (channels,)]
    values = [torch.randn(each, generator=random) for each in [*shapes, (*tokens, channels)]]
    values[1] /= channels**0.5 / 2
    values[3] /= hidden**0.5
    return [value.to(device, dtype) for value in values]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_mlp_and_its_gradients_equal_torchs(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    skip_elsewhere(device)
    *inputs, gradient = drawn(shape, dtype, device)
    ours = [value.clone().requires_grad_() for value in inputs]
    exact = [value.double().requires_grad_() for value in inputs]
    tokens, weight, bias, last_weight, last_bias = ours
    result = gelu_linear(F.linear(tokens, weight, bias.detach()), bias, last_weight, last_bias)
    tokens, weight, bias, last_weight, last_bias = exact
    expected = F.linear(F.gelu(F.linear(tokens, weight, bias)), last_weight, last_bias)
    assert result.dtype == dtype
    # The gradient of the last bias is computed elsewhere.
    found = torch.autograd.grad(result, ours[:-1], gradient)
    right = torch.autograd.grad(expected, exact[:-1], gradient.double())
    for number, (one, other) in enumerate(zip((result, *found), (expected, *right), strict=True)):
        difference = (one.double() - other).abs().max()
        assert difference <= DTYPES[dtype] * other.abs().max(), (number, float(difference))


def test_only_the_input_of_gelu_is_saved_and_gradients_are_deterministic(device: torch.device) -> None:
    skip_elsewhere(device)
    tokens, weight, bias, last_weight, last_bias, gradient = drawn(SHAPES[0], torch.float32, device)
    saved: list[Tensor] = []

    def gradients() -> tuple[Tensor, ...]:
        leaves = [tokens.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        hidden = F.linear(tokens, weight, bias.detach())
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each: saved.append(each) or each, lambda each: each
        ):
            result = gelu_linear(hidden, bias, last_weight, last_bias)
        return torch.autograd.grad(result, leaves, gradient)

    first = gradients()
    assert [each.shape for each in saved] == [(*tokens.shape[:-1], len(bias)), last_weight.shape]
    assert all(torch.equal(one, other) for one, other in zip(first, gradients(), strict=True))


def test_the_kernels_compile_without_spilling() -> None:
    check_compiled("gelu", 1)


def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, CASES)
