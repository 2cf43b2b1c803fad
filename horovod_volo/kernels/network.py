"""Operators of the network and its loss on NVIDIA GPUs: outlook attention, and the cross-entropy.

Outlook attention has 3 x 3 windows at stride 2, which are not unfolded in memory. Invariant: only the inputs
and each softmax's sum are saved for backward, which recomputes the weights. The cross-entropy has sparse soft
targets: that of a row is `uniform` on every class plus `weights` on the classes `ids`, which may repeat.
"""

from typing import Any

import torch
from torch import Tensor

from horovod_volo.core.operators import register_kernel

# Triton is imported where a kernel is launched: shapes and costs are known without it.
_CELLS, _WINDOWS, _ROWS = 32, 8, 128  # of one program
_MAX_BLOCK_CLASSES = 4096  # as many as fit into the registers of eight warps
_BLOCK_ENTRIES = 64
# More entries of a row are merged in a table with one column per class: comparing all pairs of them would
# take longer than writing and reading the table. Rows of tokens have fewer entries.
_MAX_COMPARED_ENTRIES = 256
_TABLE_BLOCK_ENTRIES = 1024


@torch.library.custom_op("horovod_volo::outlook_fused", mutates_args=())
def fused_outlook(values: Tensor, logits: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return outlook attention of values (batch, height, width, channels), and its softmaxes' sums.

    `logits` are the attention logits (batch, rows, columns, heads * 81) of windows, multiplied by `scale`.
    The sums are binary logarithms, (batch, rows, columns, heads * 9) in fp32.
    """
    from horovod_volo.kernels import network_kernels as kernels

    values, logits = values.contiguous(), logits.contiguous()
    output, log2_sums = outputs = _outputs(values, logits)
    count = log2_sums.numel()
    kernels.softmax_sums[(-(-count // _ROWS),)](
        logits, log2_sums, count, scale, rows=_ROWS, enable_fp_fusion=True
    )
    kernels.aggregate_windows[_grid(logits, heads, _CELLS)](
        values, logits, log2_sums, output, *_sizes(values, logits, heads), scale,
        backward=False, cells=_CELLS, **_options(values, heads),
    )  # fmt: skip
    return outputs


@torch.library.custom_op("horovod_volo::outlook_fused_backward", mutates_args=())
def fused_outlook_backward(
    gradient: Tensor, values: Tensor, logits: Tensor, log2_sums: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    from horovod_volo.kernels import network_kernels as kernels

    gradient, values, logits = gradient.contiguous(), values.contiguous(), logits.contiguous()
    grad_values, grad_logits = gradients = _gradients(values, logits)
    common = *_sizes(values, logits, heads), scale
    options = _options(values, heads)
    kernels.logits_backward[_grid(logits, heads, _WINDOWS)](
        gradient, values, logits, grad_logits, log2_sums, *common, windows=_WINDOWS, num_warps=2, **options
    )
    kernels.aggregate_windows[_grid(logits, heads, _CELLS)](
        gradient, logits, log2_sums, grad_values, *common, backward=True, cells=_CELLS, **options
    )
    return gradients


def _sizes(values: Tensor, logits: Tensor, heads: int) -> tuple[int, ...]:
    batch, rows, columns = logits.shape[:3]
    return batch * rows * columns, heads, rows, columns, values.shape[1], values.shape[2]


def _grid(logits: Tensor, heads: int, windows: int) -> tuple[int]:
    batch, rows, columns = logits.shape[:3]
    return (-(-batch * rows * columns // windows) * heads,)


def _options(values: Tensor, heads: int) -> dict[str, int]:
    head_dim = values.shape[3] // heads
    lanes = max(16, 1 << (head_dim - 1).bit_length())  # tensor cores need 16
    return {"head_dim": head_dim, "lanes": lanes, "enable_fp_fusion": True}  # Triton's default, until 3.10


def _outputs(values: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    sums = logits.new_empty((*logits.shape[:3], logits.shape[3] // 9), dtype=torch.float32)
    return values.new_empty(values.shape), sums


def _gradients(values: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor, None, None]:
    gradients = fused_outlook_backward(gradient, *ctx.saved_tensors, ctx.heads, ctx.scale)
    return *gradients, None, None


fused_outlook.register_fake(lambda values, logits, *_: _outputs(values, logits))
fused_outlook_backward.register_fake(lambda _, values, logits, *__: _gradients(values, logits))
fused_outlook.register_autograd(_backward, setup_context=_setup_context)
register_kernel("outlook attention", fused_outlook)


@torch.library.custom_op("horovod_volo::soft_cross_entropy", mutates_args=())
def loss_with_lse(logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-sum-exp of the logits of each row, both (rows,) in fp32."""
    from horovod_volo.kernels import network_kernels as kernels

    loss, lse = outputs = _row_outputs(logits)
    target = (uniform.contiguous(), ids.contiguous(), weights.contiguous())
    kernels.loss_kernel[(len(logits),)](
        logits, *target, loss, lse, logits.shape[1], ids.shape[1], **_blocks(logits)
    )
    return outputs


@torch.library.custom_op("horovod_volo::soft_cross_entropy_gradient", mutates_args=("grad",))
def write_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    uniform: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Write the gradient of the logits into contiguous `grad`, which may be the logits themselves."""
    from horovod_volo.kernels import network_kernels as kernels

    uniform, ids, weights = uniform.contiguous(), ids.contiguous(), weights.contiguous()
    (rows, classes), entries = logits.shape, ids.shape[1]
    table = None
    if entries > _MAX_COMPARED_ENTRIES:
        table = torch.zeros(rows, classes, dtype=torch.int64, device=logits.device)
        blocks = -(-entries // _TABLE_BLOCK_ENTRIES)
        kernels.table_kernel[(rows, blocks)](
            ids, weights, table, classes, entries, _TABLE_BLOCK_ENTRIES, enable_fp_fusion=True
        )
    kernels.gradient_kernel[(rows,)](
        logits, uniform, ids, weights, lse, grad_loss.contiguous(), grad, table, classes, entries,
        tabled=table is not None, **_blocks(logits),
    )  # fmt: skip


def _row_outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return loss, torch.empty_like(loss)


def _blocks(logits: Tensor) -> dict[str, Any]:
    block_classes = min(1 << (logits.shape[1] - 1).bit_length(), _MAX_BLOCK_CLASSES)  # a power of two
    return {
        "block_classes": block_classes,
        "block_entries": _BLOCK_ENTRIES,
        "enable_fp_fusion": True,  # Triton's default, until 3.10
        "num_warps": 8 if block_classes == _MAX_BLOCK_CLASSES else 4,
    }


loss_with_lse.register_fake(lambda logits, *_: _row_outputs(logits))
register_kernel("loss", (loss_with_lse, write_gradient))
