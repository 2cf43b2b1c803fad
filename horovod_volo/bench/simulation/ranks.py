"""The ranks that `bench scaling` measures: forked here, so that torch and Horovod are imported once.

    python -m horovod_volo.bench.simulation.ranks FILE JOB

A rank on a host enters it before it opens anything. All ranks end with this process, and when one fails.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from horovod_volo.bench.pairs import Action, Block, alternate, timed
from horovod_volo.bench.peers_exchange import measure_layouts, measure_replay, measure_ring, meet
from horovod_volo.bench.shaped_hosts import INTERFACE, Host
from horovod_volo.bench.synthetic import random_batch, step_of, synthetic_job
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.config.values import assemble

_CLASSES = 10
_STEPS_A_BLOCK = 4
_MIB = 2**20
_PORT = 29500  # on a host of its own, where every port is free
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# The simulator's constants say the same: Horovod's usual cycle, in milliseconds, and buckets as they are.
_CYCLE, _FUSION = "1", "0"
_FORK = multiprocessing.get_context("fork")


def main(arguments: list[str]) -> None:
    """Do a job with each number of ranks that it names, and write what was found."""
    file, context = Path(arguments[0]), json.loads(arguments[1])
    found = {ranks: _with_ranks(ranks, context) for ranks in context["ranks"]}
    file.write_text(json.dumps(found), encoding="utf-8")


def _with_ranks(ranks: int, context: dict[str, Any]) -> Any:
    """Fork the ranks; return what rank 0 found."""
    hosts = [Host(place["address"], place["pid"]) for place in context["places"][:ranks]]
    environments = _environments(ranks, hosts)
    receiver, sender = _FORK.Pipe(duplex=False)
    processes = [
        _FORK.Process(
            target=_rank,
            args=(environment, hosts[rank : rank + 1], context, sender, os.getpid()),
            daemon=True,
        )
        for rank, environment in enumerate(environments)
    ]
    for process in processes:
        process.start()
    sender.close()
    running = list(processes)
    while running:
        sentinels = wait([process.sentinel for process in running])
        ended = [process for process in running if process.sentinel in sentinels]
        for process in ended:
            process.join()
            if process.exitcode:  # the others would wait for it
                raise SystemExit(f"a rank of {ranks} ended with status {process.exitcode}")
        running = [process for process in running if process not in ended]
    return receiver.recv()


def _environments(ranks: int, hosts: Sequence[Host]) -> list[dict[str, str]]:
    """Return what a launcher would tell each rank."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "HOROVOD_SIZE": str(ranks),
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(_PORT if hosts else _free_port()),
        "GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo",
        "HOROVOD_GLOO_IFACE": INTERFACE if hosts else "lo",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_CYCLE_TIME": _CYCLE,
        "HOROVOD_FUSION_THRESHOLD": _FUSION,
    }
    own = []
    for rank in range(ranks):
        local, local_size = (0, 1) if hosts else (rank, ranks)
        cross, cross_size = (rank, ranks) if hosts else (0, 1)
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
    environment: dict[str, str],
    host: Sequence[Host],
    context: dict[str, Any],
    sender: Connection,
    parent: int,
) -> None:
    """Be one rank, from its birth to its end."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent has gone")
    if host:
        host[0].enter()
    os.environ.update(environment)
    torch.set_num_threads(1)
    size = int(environment["WORLD_SIZE"])
    if "model" in context and size == 1:
        sender.send(_measure_steps(World.single(), context))
        return
    names = [place["address"] for place in context["places"][:size]]
    with meet(",".join(f"{name}:1" for name in names) or f"localhost:{size}") as world:
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
    """Return the seconds of a step with the other ranks, and beside them. Collective: every rank calls."""
    config = assemble(
        {
            "model": context["model"],
            "img_size": context["img_size"],
            "batch_size": context["batch_size"],
            "token_label": True,
            "token_label_data": "random",
        },
        fallback_name="bench",
    )
    together, apart = _stepper(config, world), _stepper(config, World.single())

    torch.set_num_threads(1)  # a share of the host may be more
    together_block, apart_block = _begun_by_all(together, world), _begun_by_all(apart, world)
    together_block()
    apart_block()
    found = alternate(together_block, apart_block, context["pairs"])
    return {"together": list(found.ours), "apart": list(found.peer)}


def _begun_by_all(step: Action, world: World) -> Block:
    block = timed(step, _STEPS_A_BLOCK, torch.device("cpu"))

    def begin() -> float:
        world.broadcast_object(None)
        return block()

    return begin


def _stepper(config: Config, world: World) -> Action:
    context = synthetic_job(config, world, _CLASSES)
    return step_of(context, random_batch(config, _CLASSES, context.resources.device, seed=world.rank))


if __name__ == "__main__":
    main(sys.argv[1:])
