"""Say what is wrong: with the installation, with each host, and between the ranks.

    python -m horovod_volo.doctor
    horovodrun -np 8 python -m horovod_volo.doctor --shared /path/to/runs
    mpirun -np 2 -bind-to none -map-by slot python -m horovod_volo.doctor --json -

Start it as training will be started. Rank 0 tells for all. Exit status: 0 nothing failed; 1 something
did; 2 a mistake in the request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_volo.config.arguments import Parser, add_binding
from horovod_volo.core.errors import UserError

if TYPE_CHECKING:
    from horovod_volo.cluster.launch_env import LaunchEnv
    from horovod_volo.doctor.consultation import Heard
    from horovod_volo.doctor.finding import Finding
    from horovod_volo.doctor.report import Report

DONE, FAILED, MISTAKE = 0, 1, 2
STDOUT = "-"
_LAST_WORDS_SECONDS = 10.0

# What the work needs is imported where it runs: --help must answer at once.


def main(arguments: Sequence[str]) -> int:
    """Run one rank; return its exit status."""
    try:
        chosen = build_parser().parse_args(arguments)
    except UserError as problem:
        return _refuse(problem)
    from horovod_volo.cluster.launch_env import read_launch_env
    from horovod_volo.cluster.pinning import bind

    place = read_launch_env()
    bound = bind(chosen.binding)  # before torch: what is looked at is what training gets
    from horovod_volo.doctor.gpus import look_at_gpus
    from horovod_volo.doctor.host import look_at_host
    from horovod_volo.doctor.installation import look_at_installation
    from horovod_volo.doctor.network import look_at_interfaces

    own = [*look_at_installation(), *look_at_gpus(), *look_at_host(place, bound), *look_at_interfaces()]
    from horovod_volo.doctor.consultation import consult

    heard = consult(own, bound, Path(chosen.shared))
    if heard.problem is None:
        return _tell_for_all(heard, place, chosen.json)
    status = _tell_alone(own, heard, place, chosen.json)
    # A rank that waits inside Horovod for others cannot be asked to leave.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tell_for_all(heard: Heard, place: LaunchEnv, file: str) -> int:
    """Let rank 0 tell, and all ranks end alike. Collective: every rank calls this."""
    world = heard.world
    assert world is not None
    status = _publish(_report(heard.findings, heard, place), file) if world.is_rank_zero else DONE
    return int(world.broadcast_object(status))  # nobody leaves before the report is out


def _tell_alone(own: list[Finding], heard: Heard, place: LaunchEnv, file: str) -> int:
    """Tell what is known without the others."""
    assert heard.problem is not None
    if place.rank == 0:
        known = heard.findings or [own]
        return _publish(_report([[heard.problem, *known[0]], *known[1:]], heard, place), file)
    news = [] if heard.follows else [heard.problem]
    news += [] if heard.findings else own  # rank 0 has them
    for finding in news:
        if finding.level == "failure":
            words = f"rank {place.rank}: {finding.subject}: {finding.text}. {finding.remedy}"
            print(words, file=sys.stderr, flush=True)
    # The first rank that leaves makes the launcher end the others: rank 0 has more to tell, and goes first.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_LAST_WORDS_SECONDS)
    return FAILED


def _report(by_rank: list[list[Finding]], heard: Heard, place: LaunchEnv) -> Report:
    from horovod_volo.doctor.finding import merged
    from horovod_volo.doctor.report import Report

    return Report(
        ranks=place.size,
        hosts=tuple(heard.hosts) or (os.uname().nodename,),
        launcher=place.launcher,
        controller=heard.world.controller if heard.world else "ranks have not met",
        findings=tuple(merged(by_rank)),
    )


def _publish(report: Report, file: str) -> int:
    """Print and write the report; return the status it means."""
    record = json.dumps(report.record(), indent=2)
    print(record if file == STDOUT else report.text(), flush=True)
    if file not in ("", STDOUT):
        from horovod_volo.core.atomic_file import atomic_write

        try:
            with atomic_write(Path(file)) as opened:
                opened.write(f"{record}\n".encode())
        except OSError as error:
            words = f"error: --json cannot write {file}: {error.strerror}. Name another file."
            print(words, file=sys.stderr, flush=True)
            return MISTAKE
    return FAILED if report.failed else DONE


def _refuse(problem: UserError) -> int:
    """Say what is wrong with the command line: once, where ranks can meet."""
    from horovod_volo.cluster.launch_env import read_launch_env

    if read_launch_env().size > 1:
        from horovod_volo.cluster.entry import refuse

        with contextlib.suppress(Exception):  # ranks that cannot meet: each says it
            return refuse(problem)
    print(f"error: {problem}", file=sys.stderr, flush=True)
    return MISTAKE


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = Parser(
        prog="horovodrun -np RANKS python -m horovod_volo.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--shared",
        default="runs",
        metavar="DIR",
        help="where results will go, as --output of training (%(default)s)",
    )
    add_binding(parser)
    add("--json", default="", metavar="FILE", help="write all this to a file; - instead of the text")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
