"""Outlook attention on a CPU by embedding bags, without unfold and fold.

The output at a target pixel is a sum over the windows that cover it and over the source pixels of each
window: attention weight times value of the source. An embedding bag computes such sums; with targets and
sources exchanged it computes the gradient of the values. Images are processed one by one, so that
intermediate results stay in cache. Invariant: the tables omit pixels outside the image, whose values are 0.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# PyTorch warns once per process, because of the sparse product below.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


@dataclass(frozen=True)
class Bags:
    """For each output row, the attention weights and the input rows whose products it sums."""

    attention: Tensor  # indices into an image's attention weights (sources, windows * heads * targets)
    rows: Tensor
    starts: Tensor  # offsets of the bags, and the end of the last


@dataclass(frozen=True)
class Tables:
    """Index tables of one image; a row is one head of one pixel."""

    to_targets: Bags
    to_sources: Bags
    starts: Tensor  # CSR offsets of each target's distinct sources
    sources: Tensor
    pairs: Tensor  # for each attention weight, the index of its (target, source) pair, or one past the last


@lru_cache(maxsize=32)  # a few MB each at 224 px
def tables_of(
    height: int, width: int, rows: int, columns: int, heads: int, kernel: int, padding: int, stride: int
) -> Tables:
    """Build the tables of an image of height x width pixels with rows x columns windows."""
    across = torch.arange(kernel) - padding
    down = (torch.arange(rows) * stride)[:, None] + across  # (rows, kernel)
    right = (torch.arange(columns) * stride)[:, None] + across
    inside = ((down >= 0) & (down < height))[:, None, :, None] & ((right >= 0) & (right < width))[:, None]
    pixels = (down * width)[:, None, :, None] + right[:, None]  # (rows, columns, kernel, kernel)
    pixels, inside = pixels.reshape(rows * columns, -1), inside.reshape(rows * columns, -1)
    first_rows = pixels[:, None] * heads + torch.arange(heads)[:, None]  # (windows, heads, places)
    shape = (kernel * kernel, *first_rows.shape)  # of attention: (sources, windows, heads, targets)
    targets = first_rows.expand(shape).flatten()
    sources = first_rows.permute(2, 0, 1)[..., None].expand(shape).flatten()
    valid = (inside[:, None] & inside.T[..., None, None]).expand(shape).flatten()
    attention = valid.nonzero().flatten()
    targets, sources, all_rows = targets[valid], sources[valid], height * width * heads
    names, pair_of = torch.unique(targets * all_rows + sources, return_inverse=True)
    pairs = torch.full(valid.shape, len(names))
    pairs[attention] = pair_of
    return Tables(
        _bags(attention, targets, sources, all_rows),
        _bags(attention, sources, targets, all_rows),
        _starts(names // all_rows, all_rows),
        (names % all_rows).int(),
        pairs.int(),
    )


def _bags(attention: Tensor, owners: Tensor, others: Tensor, rows: int) -> Bags:
    order = torch.argsort(owners * rows + others)
    return Bags(attention[order].int(), others[order].int(), _starts(owners, rows))


def _starts(owners: Tensor, rows: int) -> Tensor:
    return F.pad(torch.bincount(owners, minlength=rows).cumsum(0), (1, 0)).int()


@torch.library.custom_op("horovod_volo::outlook_gather", mutates_args=(), device_types="cpu")
def outlook_gather(
    values: Tensor, logits: Tensor, geometry: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and, for backward, the attention weights (batch, sources, windows * heads * targets).

    `geometry` is rows and columns of windows, heads, kernel, padding, stride.
    """
    tables = tables_of(*values.shape[1:3], *geometry)
    heads, places = geometry[2], geometry[3] ** 2
    values, logits, mixed = values.contiguous(), logits.contiguous(), _like(values)
    attention = _exact(logits.new_empty(0)).new_empty(len(values), places, logits[:1].numel() // places)
    transposed = attention.new_empty(attention.shape[1:])
    gathered = attention.new_empty(len(tables.to_targets.attention))
    for number in range(len(values)):
        # The sources come first, as a softmax over an innermost dimension of nine takes three times as long.
        torch.mul(_exact(logits[number]).view(-1, places).T, scale, out=transposed)
        torch.softmax(transposed, 0, out=attention[number])
        mixed[number] = _summed(tables.to_targets, attention[number], values[number], heads, gathered)
    return mixed, attention


@torch.library.custom_op("horovod_volo::outlook_gather_backward", mutates_args=(), device_types="cpu")
def outlook_gather_backward(
    gradient: Tensor, values: Tensor, attention: Tensor, geometry: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the values and of the logits."""
    tables = tables_of(*values.shape[1:3], *geometry)
    heads, places = geometry[2], geometry[3] ** 2
    gradient, values = gradient.contiguous(), values.contiguous()
    of_values, of_logits = _like(values), _like_logits(values, geometry)
    of_attention = attention.new_empty(attention.shape[1:])
    gathered = attention.new_empty(len(tables.to_sources.attention))
    products = attention.new_empty(len(tables.sources) + 1)  # pairs outside the image read the last, 0
    rows = len(tables.starts) - 1
    sampled = torch.sparse_csr_tensor(
        tables.starts, tables.sources, products[:-1], size=(rows, rows), check_invariants=False
    )
    for number in range(len(values)):
        targets, sources = _rows(gradient[number], heads), _rows(values[number], heads)
        of_values[number] = _summed(tables.to_sources, attention[number], gradient[number], heads, gathered)
        products.zero_()  # with beta=0, a NaN of the previous image would remain
        torch.sparse.sampled_addmm(sampled, targets, sources.T, beta=0, alpha=scale, out=sampled)
        torch.index_select(products, 0, tables.pairs, out=of_attention.view(-1))
        of_softmax = torch._softmax_backward_data(of_attention, attention[number], 0, attention.dtype)
        of_logits[number].view(-1, places).T.copy_(of_softmax)
    return of_values, of_logits


def _summed(bags: Bags, attention: Tensor, image: Tensor, heads: int, gathered: Tensor) -> Tensor:
    """Return the sums of the bags in the shape of the image."""
    torch.index_select(attention.view(-1), 0, bags.attention, out=gathered)
    sums = F.embedding_bag(
        bags.rows,
        _rows(image, heads),
        bags.starts,
        mode="sum",
        per_sample_weights=gathered,
        include_last_offset=True,
    )
    return sums.view(image.shape)


def _rows(image: Tensor, heads: int) -> Tensor:
    return _exact(image).view(-1, image.shape[-1] // heads)


def _exact(tensor: Tensor) -> Tensor:
    """Return the tensor in the precision in which sums are computed: fp64 for fp64, else fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _like_logits(values: Tensor, geometry: list[int]) -> Tensor:
    rows, columns, heads, kernel = geometry[:4]
    return values.new_empty((values.shape[0], rows, columns, heads * kernel**4))


@outlook_gather.register_fake
def _fake(values: Tensor, logits: Tensor, geometry: list[int], _: float) -> tuple[Tensor, Tensor]:
    rows, columns, heads, kernel = geometry[:4]
    shape = (values.shape[0], kernel**2, rows * columns * heads * kernel**2)
    return _like(values), _exact(logits.new_empty(0)).new_empty(shape)


@outlook_gather_backward.register_fake
def _fake_backward(
    _: Tensor, values: Tensor, _attention: Tensor, geometry: list[int], _scale: float
) -> tuple[Tensor, Tensor]:
    return _like(values), _like_logits(values, geometry)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, _, ctx.geometry, ctx.scale = inputs
    ctx.save_for_backward(values, output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
    of_both = outlook_gather_backward(gradient, *ctx.saved_tensors, ctx.geometry, ctx.scale)
    return *of_both, None, None


outlook_gather.register_autograd(_backward, setup_context=_setup_context)
