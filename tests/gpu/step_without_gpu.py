"""Takes a training step on a GPU that does not exist: tensors have types, shapes and a device, but no data.

Arguments: the library made of cuda_without_gpu.cpp, then settings of runs as JSON. Every operation that would
make the host wait for the GPU is an error, also the one that "planted" adds. With `compiled`, the blocks
are traced as for torch.compile, and a graph break is an error. Networks have few blocks of each kind. Prints
the outcome of each run as JSON.
"""

import ctypes
import importlib.util
import itertools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch


def load_before_torch(library: str) -> ctypes.CDLL:
    """Load the library after those it needs, but before PyTorch asks for its CUDA part."""
    spec = importlib.util.find_spec("torch")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(library)


stand_in = load_before_torch(sys.argv[1])

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402

from horovod_volo.bench import synthetic  # noqa: E402
from horovod_volo.bench.synthetic import bench_config, random_labels, synthetic_context  # noqa: E402
from horovod_volo.cluster.collectives import Collectives  # noqa: E402
from horovod_volo.cluster.compression import BucketScales  # noqa: E402
from horovod_volo.cluster.world import RankResources, World  # noqa: E402
from horovod_volo.core.batch import TrainBatch  # noqa: E402
from horovod_volo.core.operators import OPERATORS, use_kernels  # noqa: E402
from horovod_volo.engine.step import train_step  # noqa: E402
from horovod_volo.models.compiled import compile_blocks  # noqa: E402
from horovod_volo.models.lvvit import LVVIT_SIZES  # noqa: E402
from horovod_volo.models.volo import SIZES  # noqa: E402
from tests.gpu.synchronisation import RefuseSynchronisation  # noqa: E402

stand_in.use_guard()
GPU = torch.device("cuda:0")
BATCH, SIDE = 8, 224


class AlikeRanks(Collectives):
    """The collectives of several ranks, which all have the same."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def reduce_scatter_async(self, tensor: torch.Tensor, name: str) -> Any:
        return lambda: tensor.chunk(self._ranks)[0]

    def allgather_async(self, part: torch.Tensor, name: str) -> Any:
        return lambda: torch.cat([part] * self._ranks)


class CheckedStep(RefuseSynchronisation):
    """Raises AssertionError at a product of other numbers than bf16; attention without flash has its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "convolution", "convolution_backward"):
            given = {each.dtype for each in args if isinstance(each, torch.Tensor)}
            assert given == {torch.bfloat16}, f"{func} of {given}"
        return super().__torch_dispatch__(func, types, args, kwargs)


def rates(*arguments: Any, **named: Any) -> torch.Tensor:
    """Return torch.linspace, of which networks make lists, with its values."""
    with unset_fake_temporarily():  # type: ignore[no-untyped-call]
        return linspace(*arguments, **named)


linspace, compiler = torch.linspace, torch.compile


def take_step(settings: dict[str, Any], *, compiled: bool, planted: bool, ranks: int) -> None:
    precision = {"precision": "bf16", "clip_grad": 1.0, "ema_decay": 0.99}
    config = bench_config(**(precision | settings | {"batch_size": BATCH, "img_size": SIDE}))
    with (
        FakeTensorMode(),
        patch.object(FakeTensorMode, "__deepcopy__", lambda self, _: self, create=True),
        patch.object(torch.nn.Module, "to", lambda self, *_, **__: self),  # made on the GPU, below
        patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda: True),
        patch.object(torch.Tensor, "pin_memory", lambda self: self),
        patch.object(torch.cuda, "default_generators", (torch.Generator(),)),
        patch.object(torch.cuda, "Event", MagicMock()),  # recording one does not wait
        patch.object(torch, "linspace", rates),
        patch.object(BucketScales, "update_after_restore", lambda _: None),  # at the start, where it may wait
        # A graph break is an error.
        patch.object(torch, "compile", lambda block, **_: compiler(block, backend="eager", fullgraph=True)),
        patch.object(synthetic, "choose_kernels", lambda *_: use_kernels(OPERATORS)),
    ):
        with GPU:
            world = World(size=ranks, collectives=AlikeRanks(ranks))
            context = synthetic_context(config, world, RankResources(GPU, 1, ""))
        model = context.state.model
        assert {parameter.device for parameter in model.parameters()} == {GPU}
        if compiled:
            compile_blocks(model)
        if planted:
            mlp = next(module for module in model.modules() if type(module).__name__ == "Mlp")
            mlp.register_forward_hook(lambda _, __, output: print(output.sum().item()))
        context.state.reducer.scales.initialized = True  # by the first step, after which the host waits
        # torch.compile does nothing inside a dispatch mode.
        with nullcontext() if compiled else CheckedStep():
            labels = random_labels(BATCH, config.model.num_classes, GPU, seed=0)
            images = torch.empty(BATCH, 3, SIDE, SIDE, device=GPU)
            batch = TrainBatch(images, labels, np.arange(BATCH), np.arange(BATCH))
            train_step(context, itertools.repeat(batch))
        assert not compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    context.close()


if __name__ == "__main__":
    for sizes in SIZES.values():
        sizes["layers"] = (1, 1, 2, 1)
    for sizes in LVVIT_SIZES.values():
        sizes["layers"] = 3
    for argument in sys.argv[2:]:
        run = json.loads(argument)
        torch._dynamo.reset()
        try:
            switches = {name: run.pop(name, False) for name in ("compiled", "planted")}
            take_step(run, **switches, ranks=run.pop("ranks", 1))
            outcome = "took a step"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(outcome), flush=True)
