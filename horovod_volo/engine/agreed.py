"""How a program of many ranks ends: its statuses, and one message for what is wrong, whoever finds it."""

from __future__ import annotations

from collections.abc import Callable

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.launch import promised
from horovod_volo.cluster.ring import RankLostError
from horovod_volo.cluster.world import AgreedError, World
from horovod_volo.config.errors import UserError
from horovod_volo.monitor.problems import tell

FAILED, MISTAKE = 1, 2


def on_all_ranks(work: Callable[[World], int], bound: Binding) -> int:
    """Meet the other ranks and do `work`; return its status, or that of what went wrong."""
    rank = promised().rank
    try:
        world = World.join(bound)
        return work(world)
    except AgreedError as problem:
        return _say_once(problem, world)
    except UserError as problem:
        tell(f"error on rank {rank}: {problem}")
        return MISTAKE
    except RankLostError as problem:
        tell(f"rank {rank} stops: {problem}")
        return FAILED


def refuse(problem: UserError) -> int:
    """Say what is wrong with a command line that all ranks were given alike; return the status."""
    return _say_once(problem, World.join())


def _say_once(problem: UserError, world: World) -> int:
    if world.is_main:
        tell(f"error: {problem}")
    world.share(None)  # a rank that left before the message is out would make the launcher end it
    return MISTAKE
