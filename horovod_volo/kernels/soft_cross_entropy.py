"""Cross-entropy of logits with sparse soft targets on NVIDIA GPUs, as two operators.

The target of a row is `uniform` on every class plus `weights` on the classes `ids`, which may repeat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horovod_volo.core.operators import register_kernel

_MAX_BLOCK_CLASSES = 4096  # as many as fit into the registers of eight warps
_BLOCK_ENTRIES = 64
# More entries of a row are merged in a table with one column per class: comparing all pairs of them would
# take longer than writing and reading the table. Rows of tokens have fewer entries.
_MAX_COMPARED_ENTRIES = 256
_TABLE_BLOCK_ENTRIES = 1024

# Triton is imported where a kernel is launched: shapes and costs are known without it.


@torch.library.custom_op("horovod_volo::soft_cross_entropy", mutates_args=())
def loss_with_lse(logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-sum-exp of the logits of each row, both (rows,) in fp32."""
    from horovod_volo.kernels import soft_cross_entropy_kernels as kernels

    rows = logits.shape[0]
    loss = torch.empty(rows, device=logits.device)
    lse = torch.empty_like(loss)
    target = (uniform.contiguous(), ids.contiguous(), weights.contiguous())
    kernels.loss_kernel[(rows,)](logits, *target, loss, lse, logits.shape[1], ids.shape[1], **_blocks(logits))
    return loss, lse


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
    from horovod_volo.kernels import soft_cross_entropy_kernels as kernels

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


@loss_with_lse.register_fake
def _fake(logits: Tensor, _uniform: Tensor, _ids: Tensor, _weights: Tensor) -> tuple[Tensor, Tensor]:
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


register_kernel("loss", (loss_with_lse, write_gradient))
