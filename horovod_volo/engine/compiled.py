"""A network's blocks compiled by torch: fewer passes over memory, after a slow start.

Block by block, never the whole network: backward then ends one block after the other, and a bucket of
gradients leaves while the blocks below are still at work. Evaluation keeps the blocks as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from horovod_volo.core.errors import UserError

Call = Callable[..., Any]


def check_compiler() -> None:
    """Raise UserError where torch would find no C++ compiler, which it needs on a GPU too."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"--compile needs a C++ compiler, and there is no {compiler} on this machine. Install g++, name "
            "another by the variable CXX, or drop --compile."
        )


def compile_blocks(model: nn.Module, backend: str | Call = "inductor") -> None:
    """Have the model's repeated blocks compiled when training first comes to them, each class once."""
    found = list(blocks_of(model))
    if not found:
        raise UserError(
            f"--compile is about a network's repeated blocks, and {type(model).__name__} has none. Drop it."
        )
    # Blocks of a class share their code, but widths and rates are constants in it: a form for each.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(found))
    compiled: dict[Call, Call] = {}
    for block in found:
        # Where stochastic depth computes a branch for some images only, their number varies: the branch is
        # compiled alone, and torch sees at the second number that it may be any.
        for name in getattr(block, "branches", ("forward",)):
            method = getattr(type(block), name)
            if method not in compiled:
                compiled[method] = torch.compile(method, backend=backend)
            setattr(block, name, partial(_in_training, block, compiled[method], method))


def _in_training(block: nn.Module, compiled: Call, plain: Call, *inputs: Any) -> Any:
    return (compiled if block.training else plain)(block, *inputs)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Go through the outermost modules that stand in a row of their own kind and have parts."""
    for module in model.children():
        parts = list(module.children())
        in_a_row = isinstance(module, nn.Sequential | nn.ModuleList) and len(set(map(type, parts))) == 1
        if in_a_row and all(any(part.children()) for part in parts):
            yield from parts
        else:
            yield from blocks_of(module)
