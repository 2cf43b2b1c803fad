"""The entry point of programs that run on several ranks: exit statuses, and one message for each error.

Ranks that were not started alike are refused in their first exchange. Later each would wait for a collective
that the other never calls.

torch and Horovod are imported where they are used, so that `--help` and a mistake in a flag answer at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.config.schema import Config, by_flag
from horovod_volo.core.environment import code_digest, package_versions
from horovod_volo.core.errors import MISTAKE, UserError, print_error

if TYPE_CHECKING:
    from horovod_volo.cluster.binding import Binding
    from horovod_volo.cluster.world import World

FAILED, LOST = 1, -1
_OF_ONE_RANK = {"--binding", "--workers"}  # settings that may differ from rank to rank
_SHOWN = 3  # differences

_connected: dict[str, World] = {}  # the world of this process, by the binding that it was connected with


def run_on_ranks(
    work: Callable[[World], int], binding: Binding, flags: Mapping[str, Any], *, ranks_change: bool = False
) -> int:
    """Initialize Horovod and run `work`; return its exit status, or the status of the error that ended it.

    `flags` are the values of all flags, which must be the same on all ranks. If another rank is lost or hosts
    have changed, return LOST if the set of ranks may change (`ranks_change`).
    """
    from horovod_volo.cluster.collectives import HostsChangedError, RankLostError
    from horovod_volo.cluster.world import AllRanksError, World

    rank = read_launch_env().rank
    try:
        world = World.connect(binding)
        check_same_start(world, flags)
        return work(world)
    except AllRanksError as error:
        return _print_once(error, world)
    except UserError as error:
        print_error(f"error on rank {rank}: {error}")
        return MISTAKE
    except HostsChangedError:
        return LOST
    except RankLostError as error:
        print_error(f"rank {rank} {'goes on without it' if ranks_change else 'stops'}: {error}")
        return LOST if ranks_change else FAILED


def connect_once(config: Config) -> World:
    """Bind this process and connect it to its launcher's ranks, at the first call. Collective.

    Raise UserError if the ranks' settings differ, or this process was bound otherwise.
    """
    from horovod_volo.cluster.pinning import bind
    from horovod_volo.cluster.world import World

    mode = config.launch.binding
    if not _connected:
        # A process alone, such as a notebook, keeps its cores unless a binding was asked for.
        is_bound = read_launch_env().size > 1 or "binding" in config.non_default
        _connected[mode] = World.connect(bind(mode if is_bound else "none"))
    if mode not in _connected:
        raise UserError(
            "binding differs from that of the first Trainer of this process, which bound it. Give the same, "
            "or start another process."
        )
    world = _connected[mode]
    check_same_start(world, by_flag(config))
    return world


def refuse(error: UserError) -> int:
    """Print an error of the command line, which other ranks may not have; return the exit status."""
    if read_launch_env().size == 1:
        print_error(f"error: {error}")
        return MISTAKE
    from horovod_volo.cluster.world import AllRanksError, World

    world = World.connect()
    try:
        world.raise_on_all_ranks(error)
    except AllRanksError as on_all:
        error = on_all
    return _print_once(error, world)


def check_same_start(world: World, flags: Mapping[str, Any]) -> None:
    """Raise on all ranks if one refused its command line, or another differs from rank 0. Collective."""
    if world.size == 1:
        return
    world.raise_on_all_ranks(None)  # here the others learn of a rank that called `refuse`
    own = {name: str(value) for name, value in flags.items() if name not in _OF_ONE_RANK}
    own |= package_versions() | {"the code of horovod_volo": code_digest()}
    by_rank = world.allgather_object((socket.gethostname(), own))
    different = [text for name in own if (text := _difference(name, by_rank))]
    if different:
        from horovod_volo.cluster.world import AllRanksError

        raise AllRanksError(
            f"The ranks were not started alike: {'; '.join(different[:_SHOWN])}. Start all of them with the "
            "same command, code and packages; `horovod-volo doctor` compares hosts."
        )


def _difference(name: str, by_rank: list[tuple[str, dict[str, str]]]) -> str:
    """Return how the first rank that differs from rank 0 does so; else nothing."""
    values = [(own.get(name, "not set") or "empty", host) for host, own in by_rank]
    rank = next((rank for rank, (value, _) in enumerate(values) if value != values[0][0]), 0)
    here, there = (f"{values[each][0]} on rank {each} ({values[each][1]})" for each in (0, rank))
    return f"{name} is {here} and {there}" if rank else ""


def _print_once(error: UserError, world: World) -> int:
    if world.is_rank_zero:
        print_error(f"error: {error}")
    world.leave_together()  # when rank 0 has printed the message
    return MISTAKE
