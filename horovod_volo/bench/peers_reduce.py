"""Horovod's own DistributedOptimizer, as its documentation says to use it: the peer of our reducer."""

from __future__ import annotations

from typing import Any, Literal

import horovod.torch as hvd
from torch import nn
from torch.optim import Optimizer


def distributed_optimizer(
    optimizer: Optimizer, model: nn.Module, compression: Literal["none", "fp16"]
) -> Any:
    """Wrap an optimizer: its step waits for gradients averaged over ranks. Horovod must be running."""
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none,
    )
