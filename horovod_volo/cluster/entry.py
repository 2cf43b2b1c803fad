"""The entry point of programs that run on several ranks: exit statuses, and one message for each error.

torch and Horovod are imported where they are used, so that `--help` and a mistake in a flag answer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import UserError, print_error

if TYPE_CHECKING:
    from horovod_volo.cluster.binding import Binding
    from horovod_volo.cluster.world import World

FAILED, MISTAKE = 1, 2


def run_on_ranks(work: Callable[[World], int], binding: Binding) -> int:
    """Initialize Horovod and run `work`; return its exit status, or the status of the error that ended it."""
    from horovod_volo.cluster.collectives import RankLostError
    from horovod_volo.cluster.world import AllRanksError, World

    rank = read_launch_env().rank
    try:
        world = World.connect(binding)
        return work(world)
    except AllRanksError as error:
        return _print_once(error, world)
    except UserError as error:
        print_error(f"error on rank {rank}: {error}")
        return MISTAKE
    except RankLostError as error:
        print_error(f"rank {rank} stops: {error}")
        return FAILED


def refuse(error: UserError) -> int:
    """Print an error of the command line, which is the same on all ranks; return the exit status."""
    if read_launch_env().size == 1:
        print_error(f"error: {error}")
        return MISTAKE
    from horovod_volo.cluster.world import World

    return _print_once(error, World.connect())


def _print_once(error: UserError, world: World) -> int:
    if world.is_rank_zero:
        print_error(f"error: {error}")
    # The launcher kills all ranks when the first one exits: wait until rank 0 has printed the message.
    world.broadcast_object(None)
    return MISTAKE
