"""How a program of many ranks ends: its statuses, and one message for what is wrong, whoever finds it."""

from __future__ import annotations

from collections.abc import Callable

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import RankLostError
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.errors import UserError
from horovod_volo.core.messages import tell

FAILED, MISTAKE = 1, 2


def run_on_ranks(work: Callable[[World], int], bound: Binding) -> int:
    """Meet the other ranks and do `work`; return its status, or that of what went wrong."""
    rank = read_launch_env().rank
    try:
        world = World.connect(bound)
        return work(world)
    except AllRanksError as problem:
        return _say_once(problem, world)
    except UserError as problem:
        tell(f"error on rank {rank}: {problem}")
        return MISTAKE
    except RankLostError as problem:
        tell(f"rank {rank} stops: {problem}")
        return FAILED


def refuse(problem: UserError) -> int:
    """Say what is wrong with a command line that all ranks were given alike; return the status."""
    return _say_once(problem, World.connect())


def _say_once(problem: UserError, world: World) -> int:
    if world.is_rank_zero:
        tell(f"error: {problem}")
    world.broadcast_object(None)  # a rank that left before the message is out would make the launcher end it
    return MISTAKE
