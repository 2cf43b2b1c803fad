"""The ranks that `scaling` measures: forked from one process, so that torch and Horovod are imported once.

    python -m horovod_volo.bench.scaling_study.ranks FILE JOB

A rank on an emulated host enters the host's network before it opens a connection. All ranks end with this
process, and when one fails.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from horovod_volo.bench.comparison import Action, Block, alternate, timed
from horovod_volo.bench.network_namespaces import INTERFACE, NetworkHost
from horovod_volo.bench.scaling_study.peers_exchange import (
    join_ranks,
    measure_layouts,
    measure_replay,
    measure_ring,
)
from horovod_volo.bench.synthetic import (
    RANDOM_LABELS,
    checked_config,
    random_batch,
    step_of,
    synthetic_context,
)
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config

_CLASSES = 10
_STEPS_OF_BLOCK = 4
_MIB = 2**20
_PORT = 29500  # on an emulated host, where every port is free
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Run a job on each number of ranks that it names, and write what was measured."""
    file, context = Path(arguments[0]), json.loads(arguments[1])
    found = {ranks: _with_ranks(ranks, context) for ranks in context["ranks"]}
    file.write_text(json.dumps(found), encoding="utf-8")


def _with_ranks(ranks: int, context: dict[str, Any]) -> Any:
    """Fork the ranks; return what rank 0 measured."""
    hosts = [NetworkHost(place["address"], place["pid"]) for place in context["places"][:ranks]]
    receiver, sender = Pipe(duplex=False)
    arguments = (_environments(ranks, hosts), hosts, context, sender, os.getpid())
    try:
        start_processes(  # type: ignore[no-untyped-call]
            _rank, arguments, nprocs=ranks, daemon=True, start_method="fork"
        )
    except (ProcessRaisedException, ProcessExitedException) as problem:
        raise SystemExit(f"a rank of {ranks} ended: {problem}") from None
    return receiver.recv()


def _environments(ranks: int, hosts: Sequence[NetworkHost]) -> list[dict[str, str]]:
    """Return the variables that a launcher would set for each rank."""
    interface = INTERFACE if hosts else "lo"
    shared = {
        "WORLD_SIZE": str(ranks),
        "HOROVOD_SIZE": str(ranks),
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(_PORT if hosts else _free_port()),
        "GLOO_SOCKET_IFNAME": interface,
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # As in the simulator's constants: Horovod's default cycle in milliseconds, and no fusion.
        "HOROVOD_CYCLE_TIME": "1",
        "HOROVOD_FUSION_THRESHOLD": "0",
    }
    own = []
    for rank in range(ranks):
        (local, local_size), (cross, cross_size) = ((0, 1), (rank, ranks))[:: 1 if hosts else -1]
        own.append(
            {
                "RANK": str(rank),
                "HOROVOD_RANK": str(rank),
                "HOROVOD_HOSTNAME": hosts[rank].address if hosts else "localhost",
                "HOROVOD_LOCAL_RANK": str(local),
                "HOROVOD_LOCAL_SIZE": str(local_size),
                "HOROVOD_CROSS_RANK": str(cross),
                "HOROVOD_CROSS_SIZE": str(cross_size),
            }
        )
    return [shared | variables for variables in own]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def _rank(
    rank: int,
    environments: Sequence[dict[str, str]],
    hosts: Sequence[NetworkHost],
    context: dict[str, Any],
    sender: Connection,
    parent: int,
) -> None:
    """Run one rank from its start to its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent has ended")
    if hosts:
        hosts[rank].enter()
    os.environ.update(environments[rank])
    torch.set_num_threads(1)
    size = len(environments)
    if "model" in context and size == 1:
        sender.send(_measure_steps(World.single(), context))
        return
    names = [place["address"] for place in context["places"][:size]]
    with join_ranks(",".join(f"{name}:1" for name in names) or f"localhost:{size}") as world:
        found = _measure_steps(world, context) if "model" in context else _measure_exchanges(world, context)
        if world.is_rank_zero:
            sender.send(found)


def _measure_exchanges(world: World, context: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{mib:g}": measure_ring(world, round(mib * _MIB), context["pairs"]) for mib in context["ring_mib"]
    }
    found[f"{context['mib']:g}"] = measure_layouts(world, round(context["mib"] * _MIB), context["pairs"])
    if context["replay"]:
        found["replay"] = measure_replay(world, context["replay"], context["pairs"])
    return found


def _measure_steps(world: World, context: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of a step with and without exchange. Collective: every rank calls this."""
    settings = {name: context[name] for name in ("model", "img_size", "batch_size")}
    config = checked_config(settings | RANDOM_LABELS)
    together, apart = _step(config, world), _step(config, World.single())
    torch.set_num_threads(1)  # building a run sets this rank's part of the host, which may be more
    blocks = _begun_together(together, world), _begun_together(apart, world)
    for block in blocks:
        block()
    found = alternate(blocks[0], blocks[1], context["pairs"])
    return {"together": list(found.ours), "apart": list(found.peer)}


def _begun_together(step: Action, world: World) -> Block:
    block = timed(step, _STEPS_OF_BLOCK, torch.device("cpu"))

    def begin() -> float:
        world.broadcast_object(None)
        return block()

    return begin


def _step(config: Config, world: World) -> Action:
    context = synthetic_context(config, world, _CLASSES)
    return step_of(context, random_batch(config, _CLASSES, context.resources.device, seed=world.rank))


if __name__ == "__main__":
    main(sys.argv[1:])
