r"""The training entry: parse the settings, bind to the host, connect to the other ranks, train.

    horovod-volo train /path/to/images --ranks auto
    horovodrun -np 8 horovod-volo train /path/to/imagenet --recipe volo_d1 \
      --token-label-data /path/to/token_label_data

Exit status: 0 finished; 75 stopped on request and saved, start it again to resume; 2 what one message
explains, as a mistake in settings or data; 1 any other failure.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from horovod_volo.cluster.entry import refuse, run_on_ranks
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.launcher import resolve_ranks, start_ranks
from horovod_volo.cluster.stop_signals import exit_at_once
from horovod_volo.config.command_line import Request, parse
from horovod_volo.config.schema import Config, by_flag
from horovod_volo.core.errors import UserError, refuse_mistakes

if TYPE_CHECKING:
    from horovod_volo.cluster.world import World
    from horovod_volo.engine.callbacks import Callback
    from horovod_volo.engine.run import Start

DONE, STOPPED = 0, 75


def main(arguments: list[str]) -> int:
    """Run one rank; return its exit status."""
    # torch and Horovod are imported late, so that --help answers at once.
    try:
        request = parse(arguments)
        if not request.dry_run:
            start_ranks(request.ranks, "horovod_volo.train", arguments)
    except UserError as problem:
        return refuse(problem)
    return _print_dry_run(request) if request.dry_run else _train(request.config)


@refuse_mistakes
def _print_dry_run(request: Request) -> int:
    """Print the dry run on rank 0. Horovod is not started, so no rank waits for another."""
    launch = read_launch_env()
    if launch.rank == 0:
        from horovod_volo.dry_run import dry_run  # a run does not import it

        print(dry_run(request.config, resolve_ranks(request.ranks) or launch.size))
    return DONE


def _train(config: Config) -> int:
    from horovod_volo.engine.interrupts import StopRequest

    stop = StopRequest.listening()  # before torch is imported, which takes seconds
    from horovod_volo.cluster.pinning import bind

    # Before torch starts threads: they inherit the binding.
    bound = bind(config.launch.binding, ranks_change=config.launch.elastic)
    from horovod_volo.cluster.watchdog import Watchdog

    with closing(Watchdog(config.run.hang_timeout, ranks_change=config.launch.elastic)) as watchdog:
        from horovod_volo.engine.callbacks import standard_callbacks
        from horovod_volo.engine.run import FROM_DISK, LAUNCHES, run

        def train(config: Config, world: "World", callbacks: Sequence["Callback"], start: "Start") -> int:
            finished = run(config, world, stop, watchdog, callbacks=callbacks, start=start)
            world.leave_together()  # when all have closed their loggers
            return DONE if finished else STOPPED

        def once(world: "World") -> int:
            return train(config, world, standard_callbacks(), FROM_DISK)

        try:
            if config.launch.elastic:
                status = LAUNCHES.find("elastic")(config, watchdog, bound, train)
            else:
                status = run_on_ranks(once, bound, by_flag(config))
        except UserError as problem:  # the launcher is not elastic
            return refuse(problem)
    stop.ignore_from_now_on()
    return status


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
