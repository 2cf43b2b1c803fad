"""torch.compile for the repeated blocks of a model.

Each block is compiled separately, not the model as a whole: gradients are then ready block by block, and the
allreduce of a bucket overlaps with the backward of the blocks below. Evaluation runs the blocks uncompiled.
"""

import importlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.core.errors import UserError

Call = Callable[..., Any]


def check_compiler() -> None:
    """Raise UserError if torch.compile would find no C++ compiler, which it needs on GPUs too."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"--compile needs a C++ compiler, but there is no {compiler} on this machine. Install g++, set "
            "the environment variable CXX to another compiler, or drop --compile."
        )


def compile_blocks(model: nn.Module, backend: str | Call = "inductor") -> None:
    """Have torch compile the model's repeated blocks and its stem, at the first step of training."""
    blocks = list(find_blocks(model))
    if not blocks:
        raise UserError(
            f"--compile compiles repeated blocks, but {type(model).__name__} has none. Drop --compile."
        )
    _keep_compiled()
    inductor: Any = importlib.import_module("torch._inductor.config")
    if hasattr(inductor, "deterministic"):  # not before torch 2.10
        inductor.deterministic = True  # kernels that are chosen by their time would change a resumed run
    # Blocks of one class share their code, but torch recompiles it for each width and drop path rate.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
    compiled: dict[Call, Call] = {}
    # A stem's batch norms are passes over the largest activations. Those over ranks are not compiled.
    parts = ((child, set(child.modules())) for child in model.children())
    stems = [child for child, own in parts if own.isdisjoint(blocks) and nn.BatchNorm2d in map(type, own)]
    for block in blocks + stems:
        # A block whose branches have all images is compiled as a whole; otherwise drop path computes each
        # branch for a number of images that varies from step to step. All other sizes are constants.
        for name, varies in getattr(block, "compiled_methods", {"forward": False}).items():
            method = getattr(type(block), name)
            if method not in compiled:
                compiled[method] = torch.compile(method, backend=backend, dynamic=False)
            setattr(block, name, partial(_call, block, compiled[method], method, varies))


def _keep_compiled() -> None:
    """Keep what is compiled from run to run, for all ranks of a host: homes are often on NFS."""
    with suppress(OSError, RuntimeError):  # otherwise in /tmp, as is PyTorch's default
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = folder / "horovod_volo" / socket.gethostname()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _call(
    block: nn.Module, compiled: Call, uncompiled: Call, varies: bool, tokens: Tensor, *others: Any
) -> Any:
    if varies and not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(tokens, 0)
    return (compiled if block.training else uncompiled)(block, tokens, *others)


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated blocks: members of the outermost sequences of one class, if they have children."""
    for module in model.children():
        children = list(module.children())
        is_sequence = isinstance(module, nn.Sequential | nn.ModuleList) and len(set(map(type, children))) == 1
        if is_sequence and all(any(child.children()) for child in children):
            yield from children
        else:
            yield from find_blocks(module)
