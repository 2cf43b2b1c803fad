"""Outlook attention on a CPU by embedding bags, without unfold and fold.

The output at a target pixel is a sum over the windows that cover it and over the source pixels of each
window: attention weight times value of the source. An embedding bag computes such sums; with targets and
sources exchanged it computes the gradient of the values. Only so many images are processed at a time that
intermediate results stay in cache. Invariant: the tables omit pixels outside the image, whose values are 0.
"""

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from horovod_volo.core.operators import CPU_OPERATORS

_CHUNK_WEIGHTS = 2**16  # attention weights that stay in cache
# PyTorch warns once per process, because of the sparse product below.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


class Bags(NamedTuple):
    """For each output row, the attention weights and the input rows whose products it sums."""

    attention: Tensor  # indices into attention weights (images, sources, windows * heads * targets)
    rows: Tensor
    starts: Tensor  # offsets of the bags, and the end of the last


class Tables(NamedTuple):
    """Index tables of some images; a row is one head of one pixel."""

    to_targets: Bags
    to_sources: Bags
    starts: Tensor  # CSR offsets of each target's distinct sources
    sources: Tensor
    pairs: Tensor  # for each attention weight, the index of its (target, source) pair, or one past the last


@lru_cache(maxsize=32)  # a few MB each at 224 px
def build_tables(images: int, height: int, width: int, geometry: tuple[int, ...]) -> Tables:
    """Build the tables of images of height x width pixels."""
    rows, columns, heads, kernel, padding, stride = geometry
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
    # The images follow one another: their attention weights, and their rows.
    of_image = torch.arange(images)[:, None]
    attention = (attention + of_image * len(valid)).flatten()
    targets, sources = ((each + of_image * all_rows).flatten() for each in (targets, sources))
    all_rows *= images
    names, pair_of = torch.unique(targets * all_rows + sources, return_inverse=True)
    pairs = torch.full((images * len(valid),), len(names))
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
    values, logits = values.contiguous(), logits.contiguous()
    mixed, attention = outputs = _outputs(values, logits, geometry)
    chunks = _chunks(attention)
    transposed, gathered = torch.empty_like(attention[chunks[0]]), torch.empty_like(attention[chunks[0]])
    for chunk in chunks:
        tables, weights = _tables(values[chunk], geometry), attention[chunk]
        # The sources come first, as a softmax over an innermost dimension of nine takes three times as long.
        scaled = _exact(logits[chunk]).view(*weights.mT.shape).mT
        torch.softmax(torch.mul(scaled, scale, out=transposed[: len(weights)]), 1, out=weights)
        mixed[chunk] = _summed(tables.to_targets, weights, values[chunk], geometry[2], gathered)
    return outputs


@torch.library.custom_op("horovod_volo::outlook_gather_backward", mutates_args=(), device_types="cpu")
def outlook_gather_backward(
    gradient: Tensor, values: Tensor, attention: Tensor, geometry: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the values and of the logits."""
    heads = geometry[2]
    gradient, values = gradient.contiguous(), values.contiguous()
    of_values, of_logits = gradients = _gradients(values, geometry)
    chunks = _chunks(attention)
    of_attention, gathered = torch.empty_like(attention[chunks[0]]), torch.empty_like(attention[chunks[0]])
    products_of_chunk = attention.new_empty(len(_tables(values[chunks[0]], geometry).sources) + 1)
    for chunk in chunks:
        tables, weights = _tables(values[chunk], geometry), attention[chunk]
        of_values[chunk] = _summed(tables.to_sources, weights, gradient[chunk], heads, gathered)
        # Pairs outside the image read the last, 0. With beta=0, a NaN of earlier images would remain.
        products = products_of_chunk[: len(tables.sources) + 1].zero_()
        rows = len(tables.starts) - 1
        sampled = torch.sparse_csr_tensor(
            tables.starts, tables.sources, products[:-1], size=(rows, rows), check_invariants=False
        )
        targets, sources = _rows(gradient[chunk], heads), _rows(values[chunk], heads)
        torch.sparse.sampled_addmm(sampled, targets, sources.T, beta=0, alpha=scale, out=sampled)
        of_weights = of_attention[: len(weights)]
        torch.index_select(products, 0, tables.pairs, out=of_weights.view(-1))
        of_softmax = torch._softmax_backward_data(of_weights, weights, 1, attention.dtype)
        of_logits[chunk].view(*weights.mT.shape).mT.copy_(of_softmax)
    return gradients


def _tables(images: Tensor, geometry: list[int]) -> Tables:
    return build_tables(*images.shape[:3], tuple(geometry))


def _chunks(attention: Tensor) -> list[slice]:
    """Return the images to process together, as slices."""
    length = max(1, _CHUNK_WEIGHTS // attention.shape[1:].numel())
    return [slice(first, first + length) for first in range(0, max(1, len(attention)), length)]


def _summed(bags: Bags, attention: Tensor, image: Tensor, heads: int, gathered: Tensor) -> Tensor:
    """Return the sums of the bags in the shape of the image."""
    gathered = gathered.view(-1)[: len(bags.attention)]
    torch.index_select(attention.view(-1), 0, bags.attention, out=gathered)
    options: dict[str, Any] = {"mode": "sum", "per_sample_weights": gathered, "include_last_offset": True}
    return F.embedding_bag(bags.rows, _rows(image, heads), bags.starts, **options).view(image.shape)


def _rows(image: Tensor, heads: int) -> Tensor:
    return _exact(image).view(-1, image.shape[-1] // heads)


def _exact(tensor: Tensor) -> Tensor:
    """Return the tensor in the precision in which sums are computed: fp64 for fp64, else fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _outputs(values: Tensor, logits: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor]:
    rows, columns, heads, kernel = geometry[:4]
    shape = (values.shape[0], kernel**2, rows * columns * heads * kernel**2)
    return values.new_empty(values.shape), _exact(logits.new_empty(0)).new_empty(shape)


def _gradients(values: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor]:
    rows, columns, heads, kernel = geometry[:4]
    shape = (values.shape[0], rows, columns, heads * kernel**4)
    return values.new_empty(values.shape), values.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, _, ctx.geometry, ctx.scale = inputs
    ctx.save_for_backward(values, output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
    of_both = outlook_gather_backward(gradient, *ctx.saved_tensors, ctx.geometry, ctx.scale)
    return *of_both, None, None


outlook_gather.register_fake(lambda values, logits, geometry, _: _outputs(values, logits, geometry))
outlook_gather_backward.register_fake(lambda _, values, __, geometry, ___: _gradients(values, geometry))
outlook_gather.register_autograd(_backward, setup_context=_setup_context)
CPU_OPERATORS.register("outlook attention", outlook_gather)
