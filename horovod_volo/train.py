"""Train: read the settings, meet the other ranks, fit.

    horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet --recipe volo_d1

Exit status: 0 done; 75 stopped and saved, start me again; 2 a mistake in settings or data, told
in one message; 1 any other failure.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from horovod_volo.cluster.launch import promised
from horovod_volo.config.command_line import Request, parse
from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Config

if TYPE_CHECKING:
    from horovod_volo.cluster.world import World

DONE, FAILED, MISTAKE, STOPPED = 0, 1, 2, 75


def main(arguments: list[str]) -> int:
    """Run one rank; return its exit status."""
    # torch and Horovod are imported where they are needed: --help must answer at once.
    try:
        request = parse(arguments)
    except UserError as problem:
        return _refuse(problem)
    return _tell(request) if request.dry_run else _train(request.config)


def _tell(request: Request) -> int:
    """Print what would run, on one rank; nothing is started and no rank waits for another."""
    place = promised()
    if place.rank != 0:
        return DONE
    from horovod_volo.engine.dry_run import dry_run

    try:
        print(dry_run(request.config, request.ranks or place.size))
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return MISTAKE
    return DONE


def _train(config: Config) -> int:
    from horovod_volo.cluster.ring import RankLostError
    from horovod_volo.cluster.world import AgreedError, World
    from horovod_volo.engine.run import run

    place = promised()
    try:
        world = World.join()
        return DONE if run(config, world) else STOPPED
    except AgreedError as problem:
        return _say_once(problem, world)
    except UserError as problem:
        print(f"error on rank {place.rank}: {problem}", file=sys.stderr, flush=True)
        return MISTAKE
    except RankLostError as problem:
        print(f"rank {place.rank} stops: {problem}", file=sys.stderr, flush=True)
        return FAILED


def _refuse(problem: UserError) -> int:
    """Say what is wrong with a command line that all ranks were given alike."""
    from horovod_volo.cluster.world import World

    return _say_once(problem, World.join())


def _say_once(problem: UserError, world: World) -> int:
    if world.is_main:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    world.share(None)  # a rank that left before the message is out would make the launcher end it
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
