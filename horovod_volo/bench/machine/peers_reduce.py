"""Peers of our reducer, used as their documentation recommends: Horovod's optimizer and torch's DDP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from horovod_volo.bench.machine.reduce_methods import DTYPES, Compression, Method, Work, plain_method, sgd
from horovod_volo.cluster.world import World

_BUCKET_MIB = 25
_TIMEOUT = timedelta(minutes=2)


def stock_horovod(work: Work, compression: Compression, groups: int) -> Method:
    """Build a step with Horovod's DistributedOptimizer."""
    # Imported here: Horovod may be missing where there is one rank only.
    import horovod.torch as hvd

    model = work.model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none,
        num_groups=groups,
    )
    form = f"{DTYPES[compression]}, {groups or 'no'} groups"
    return plain_method(work, model, model, optimizer, form, compression)


def torch_ddp(work: Work, compression: Compression) -> Method:
    """Build a step with torch's DistributedDataParallel; inside `torch_ranks`."""
    model = work.model()
    parallel = DistributedDataParallel(
        model,
        bucket_cap_mb=_BUCKET_MIB,
        gradient_as_bucket_view=True,
        static_graph=True,
        forward_sync_buffers=False,  # ours are averaged; here nothing at all is sent for them
    )
    if compression == "fp16":
        parallel.register_comm_hook(None, fp16_compress_hook)
    return plain_method(work, model, parallel, sgd(model), DTYPES[compression], compression)


STOCK, DDP = "stock Horovod", "torch DDP"
# The forms of each, of which the fastest is the peer.
FORMS: dict[str, list[Callable[[Work], Method]]] = {
    STOCK: [partial(stock_horovod, compression=kind, groups=groups) for kind in DTYPES for groups in (0, 4)],
    DDP: [partial(torch_ddp, compression=kind) for kind in DTYPES],
}


@contextmanager
def torch_ranks(world: World, device: torch.device) -> Iterator[None]:
    """Initialise torch.distributed with the same ranks. Collective: every rank calls this."""
    one_host = world.local_size == world.size
    host = world.broadcast_object("localhost" if one_host else socket.gethostname())
    with socket.socket() as free:
        free.bind(("", 0))
        port = world.broadcast_object(free.getsockname()[1])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=world.rank,
        world_size=world.size,
        timeout=_TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
