"""The Triton kernels of residual branches against PyTorch's LayerNorm, indexing and addition.

On the CPU they run in Triton's interpreter, which must be enabled before Triton is first imported: the last
test here starts a separate process for these cases.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_process import INTERPRETED, check_compiled, run_in_interpreter, skip_elsewhere
from torch import Tensor, nn

from horovod_volo import kernels
from horovod_volo.kernels import batch_norm, gelu, residual_ops, use_fused_kernels
from horovod_volo.kernels.residual import ResidualStream
from horovod_volo.models import lvvit, volo
from horovod_volo.models.build import build_model, training_forward
from horovod_volo.models.drop_path import DropPathSample, sample_drop_path

if INTERPRETED:  # fewer programs with larger tiles, because they run one after the other
    residual_ops._PROGRAMS = batch_norm._PROGRAMS = gelu._PROGRAMS = 4
    batch_norm._TILE_ELEMENTS, gelu._TILE = 2**16, 256
BATCH, SCALE = 5, 1.25
# The images for which the branch is computed: all, some by index, all with some masked, and one.
ROWS = {"all": None, "index": [3, 0, 4], "masked": [0, -1, 2, 3, -1], "one": [2]}
PAIRS = ["all all", "masked all", "masked masked", "masked index", "index masked", "index one", "all index"]
SHAPES = [(7, 48), (2, 3, 384), (1, 5)]  # tokens and channels of an image
# dtypes of the residual stream and of the branch: in fp32, under autocast, and with a stream in bf16
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
CASES = len(PAIRS) * len(SHAPES) * len(DTYPES) + 1  # number of tests on one device
NETWORKS = 2


def maps_of(rows: list[int] | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the rows and their inverse."""
    if rows is None:
        return None, None
    position = [-1] * BATCH
    for place, row in enumerate(rows):
        if row >= 0:
            position[row] = place
    return torch.tensor(rows, device=device), torch.tensor(position, device=device)


class Branches(nn.Module):
    """LayerNorm, matrix and bias of two residual branches."""

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(channels)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in "ab")
        self.last = nn.ModuleList(nn.Linear(channels, channels) for _ in "ab")
        for parameter in self.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random) / len(parameter) ** 0.5
        self.to(device)


def by_kernels(tokens: Tensor, branches: Branches, pair: str, dtype: torch.dtype) -> Tensor:
    stream = ResidualStream(tokens)
    for rows, norm, last in zip(pair.split(), branches.norms, branches.last, strict=True):
        computed, position = maps_of(ROWS[rows], tokens.device)
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", dtype != tokens.dtype)
        try:
            stream, normed = stream.normalized(norm, computed, position)
        finally:
            torch.set_autocast_enabled("cuda", False)
        assert normed.dtype == dtype
        branch = F.linear(normed, last.weight.to(dtype), last.bias.detach().to(dtype))
        stream = ResidualStream(stream.tokens, branch, last.bias, computed, position, SCALE)
    return stream.added()


def by_torch(tokens: Tensor, branches: Branches, pair: str) -> Tensor:
    """Compute the branches for all images in float64 and mask them."""
    for rows, norm, last in zip(pair.split(), branches.norms, branches.last, strict=True):
        mask = torch.ones(BATCH) if ROWS[rows] is None else torch.zeros(BATCH)
        for row in ROWS[rows] or ():
            mask[row if row >= 0 else []] = 1
        shape = (BATCH, *[1] * (tokens.ndim - 1))
        tokens = tokens + SCALE * last(norm(tokens)) * mask.to(tokens.device, tokens.dtype).view(shape)
    return tokens


@pytest.mark.parametrize("stream_and_branch", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_branches_and_their_gradients_equal_torchs(
    device: torch.device,
    pair: str,
    shape: tuple[int, ...],
    stream_and_branch: tuple[torch.dtype, torch.dtype],
) -> None:
    skip_elsewhere(device)
    stream, dtype = stream_and_branch
    random = torch.Generator().manual_seed(0)
    tokens, grad_output = (
        (torch.randn(BATCH, *shape, generator=random) + 0.5).to(device, stream) for _ in "ab"
    )
    branches = Branches(shape[-1], device)
    exact = copy.deepcopy(branches).double()
    leaf, exact_leaf = tokens.clone().requires_grad_(), tokens.double().requires_grad_()
    ours = by_kernels(leaf, branches, pair, dtype)
    output = by_torch(exact_leaf, exact, pair)
    assert ours.dtype == stream
    found = torch.autograd.grad(ours, [leaf, *branches.parameters()], grad_output)
    expected = torch.autograd.grad(output, [exact_leaf, *exact.parameters()], grad_output.double())
    names = ["sum", "tokens", *(name for name, _ in branches.named_parameters())]
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2  # of the largest value
    for what, one, other in zip(names, (ours, *found), (output, *expected), strict=True):
        difference = (one.double() - other).abs().max()
        assert difference <= tolerance * other.abs().max(), (what, float(difference))


def test_gradients_are_deterministic(device: torch.device) -> None:
    skip_elsewhere(device)
    tokens = torch.randn(BATCH, 9, 24, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    branches = Branches(24, device)
    runs = [
        torch.autograd.grad(
            by_kernels(tokens, branches, "masked index", torch.float32).square().sum(),
            [tokens, *branches.parameters()],
        )
        for _ in range(3)
    ]
    assert all(torch.equal(one, first) for run in runs for one, first in zip(run, runs[0], strict=True))


def logits_and_gradients(name: str, *, fused: bool) -> tuple[list[Tensor], int, int]:
    """Return logits and gradients of a network, and the numbers of masked and of indexed branches."""
    torch.manual_seed(0)
    network = build_model(name, img_size=32, num_classes=5, drop_path=0.6).train()
    images = torch.randn(6, 3, 32, 32)
    use_fused_kernels(fused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_DEVICES", ("cpu", "cuda", "meta"))
        samples: list[DropPathSample] = []

        def recorded(*given: Any) -> list[DropPathSample]:
            samples.extend(sample_drop_path(*given))
            return samples

        for family in (volo, lvvit):
            patch.setattr(family, "sample_drop_path", recorded)
        logits = training_forward(network)(images, lambda tokens: tokens, 7)
        loss = sum(each.float().square().sum() for each in logits)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
    use_fused_kernels(True)
    masked = sum(sample.masked for sample in samples)
    return [*logits, *gradients], masked, sum(sample.rows is not None for sample in samples) - masked


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
def test_a_network_is_the_same_with_fused_kernels(name: str) -> None:
    """Logits and gradients in float32, with the same dropped branches."""
    if not INTERPRETED:
        pytest.skip("runs in the interpreter's process")
    plain, *_ = logits_and_gradients(name, fused=False)
    fused, masked, indexed = logits_and_gradients(name, fused=True)
    assert masked >= 1
    assert indexed >= 1
    for ours, expected in zip(fused, plain, strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1e-3)


def test_the_kernels_compile_without_spilling() -> None:
    check_compiled("residual", 15)


def test_the_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__, CASES + NETWORKS, "cpu or network")
