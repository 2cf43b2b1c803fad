r"""Train: read the settings, meet the other ranks, fit.

    horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet --recipe volo_d1 \
      --token-label-data /path/to/token_label_data

Exit status: 0 done; 75 stopped and saved, start me again; 2 a mistake in settings or data, told
in one message; 1 any other failure.
"""

from __future__ import annotations

import sys

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.config.command_line import Request, parse
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError

DONE, MISTAKE, STOPPED = 0, 2, 75


def main(arguments: list[str]) -> int:
    """Run one rank; return its exit status."""
    # torch and Horovod are imported where they are needed: --help must answer at once.
    try:
        request = parse(arguments)
    except UserError as problem:
        from horovod_volo.cluster.entry import refuse

        return refuse(problem)
    return _tell(request) if request.dry_run else _train(request.config)


def _tell(request: Request) -> int:
    """Print what would run, on one rank; nothing is started and no rank waits for another."""
    place = read_launch_env()
    if place.rank != 0:
        return DONE
    from horovod_volo.dry_run import dry_run

    try:
        print(dry_run(request.config, request.ranks or place.size))
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return MISTAKE
    return DONE


def _train(config: Config) -> int:
    from horovod_volo.engine.interrupts import StopRequest

    stop = StopRequest.listening()  # a request may come while torch is still being imported
    from horovod_volo.cluster.env_vars import HorovodOptions
    from horovod_volo.cluster.pinning import bind

    # Before torch: threads that start later inherit what is bound here.
    bound = bind(
        config.launch.binding, HorovodOptions(config.launch.horovod_autotune, config.launch.horovod_timeline)
    )
    from horovod_volo.cluster.entry import run_on_ranks
    from horovod_volo.engine.run import run

    status = run_on_ranks(lambda world: DONE if run(config, world, stop) else STOPPED, bound)
    stop.ignore_from_now_on()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
