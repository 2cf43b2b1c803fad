"""Check the installation, each host, and the connections between ranks.

    python -m horovod_volo.doctor
    horovodrun -np 8 python -m horovod_volo.doctor --shared /path/to/runs
    mpirun -np 2 -bind-to none -map-by slot python -m horovod_volo.doctor --json -
    python -m horovod_volo.doctor --ledger runs/volo_d1

Start it with the launcher and flags of training. Rank 0 prints one report for all ranks. Exit status: 0 no
failure; 1 a failure; 2 a mistake on the command line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_volo.cluster.entry import refuse
from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flags
from horovod_volo.config.values import setting_of_training
from horovod_volo.core.errors import UserError, print_error

if TYPE_CHECKING:
    from horovod_volo.cluster.launch_env import LaunchEnv
    from horovod_volo.doctor.collect import CollectedFindings
    from horovod_volo.doctor.finding import Finding

DONE, FAILED, MISTAKE = 0, 1, 2
STDOUT = "-"
_OTHERS_REPORT_SECONDS = 10.0

# Heavy modules are imported where they are used, so that --help answers at once.


def main(arguments: Sequence[str]) -> int:
    """Run one rank; return its exit status."""
    try:
        options = build_parser().parse_args(arguments)
    except UserError as error:
        return _refuse(error)
    if options.ledger:
        return _check_ledger(Path(options.ledger))
    from horovod_volo.cluster.launch_env import read_launch_env
    from horovod_volo.cluster.pinning import bind

    launch = read_launch_env()
    binding = bind(options.binding)  # before torch is imported, as in training
    from horovod_volo.doctor.exposure import check_exposure
    from horovod_volo.doctor.gpus import check_gpus, check_kernels
    from horovod_volo.doctor.host import check_host
    from horovod_volo.doctor.installation import check_installation
    from horovod_volo.doctor.network import check_interfaces

    own = [*check_installation(), *check_gpus(), *check_host(launch, binding), *check_interfaces()]
    own += check_exposure()
    own += check_kernels() if launch.size == 1 else []  # several would wait for each other's compilers
    from horovod_volo.doctor.collect import collect_findings

    collected = collect_findings(own, binding, Path(options.shared))
    if collected.problem is None:
        return _report_all_ranks(collected, launch, options.json)
    status = _report_this_rank(own, collected, launch, options.json)
    # The thread may be waiting inside Horovod, and nothing can interrupt it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _check_ledger(run: Path) -> int:
    from horovod_volo.elastic.ledger_check import check_ledger

    try:
        print(check_ledger(run))
    except UserError as error:
        print_error(f"error: {error}")
        return FAILED
    return DONE


def _report_all_ranks(collected: CollectedFindings, launch: LaunchEnv, json_file: str) -> int:
    """Publish the report on rank 0; return its status on all ranks. Collective: every rank calls this."""
    world = collected.world
    assert world is not None
    status = DONE
    if world.is_rank_zero:
        status = _publish(collected.findings, collected, launch, json_file)
    # The launcher kills all ranks when the first one exits: wait until the report is out.
    return int(world.broadcast_object(status))


def _report_this_rank(
    own: list[Finding], collected: CollectedFindings, launch: LaunchEnv, json_file: str
) -> int:
    """Publish the report of rank 0, or print this rank's failures, without the other ranks."""
    assert collected.problem is not None
    if launch.rank == 0:
        by_rank = collected.findings or [own]
        by_rank = [[collected.problem, *by_rank[0]], *by_rank[1:]]
        status = _publish(by_rank, collected, launch, json_file)
    else:
        status = FAILED
        findings = [] if collected.already_reported else [collected.problem]
        findings += [] if collected.findings else own  # otherwise rank 0 has them
        for finding in findings:
            if finding.level == "failure":
                print_error(f"rank {launch.rank}: {finding.subject}: {finding.text}. {finding.remedy}")
    if launch.size > 1:
        # When this rank exits, the launcher kills those that have not printed yet.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_OTHERS_REPORT_SECONDS)
    return status


def _publish(
    by_rank: list[list[Finding]], collected: CollectedFindings, launch: LaunchEnv, json_file: str
) -> int:
    """Print the report and write its JSON; return the exit status."""
    from horovod_volo.doctor.finding import merge_findings
    from horovod_volo.doctor.report import Report

    report = Report(
        ranks=launch.size,
        hosts=tuple(collected.hosts) or (os.uname().nodename,),
        launcher=launch.launcher,
        controller=collected.world.controller if collected.world else "not connected",
        findings=tuple(merge_findings(by_rank)),
    )
    record = json.dumps(report.record(), indent=2)
    print(record if json_file == STDOUT else report.text(), flush=True)
    if json_file not in ("", STDOUT):
        from horovod_volo.core.atomic_file import atomic_write

        try:
            with atomic_write(Path(json_file)) as opened:
                opened.write(f"{record}\n".encode())
        except OSError as error:
            print_error(f"error: --json cannot write {json_file}: {error.strerror}. Name another file.")
            return MISTAKE
    return FAILED if report.failed else DONE


def _refuse(error: UserError) -> int:
    """Print a mistake on the command line: once, if ranks can connect."""
    try:
        return refuse(error)
    except Exception:  # ranks cannot connect: each prints the message
        print_error(f"error: {error}")
        return MISTAKE


def build_parser() -> Parser:
    """Build the command line."""
    parser = Parser(prog="horovodrun -np RANKS python -m horovod_volo.doctor", description=__doc__)
    add = parser.add_argument
    add(
        "--shared",
        default="runs",
        metavar="DIR",
        help="folder of results, which all ranks must share: --output of training (%(default)s)",
    )
    add_flags(parser, setting_of_training("binding"))
    add(
        "--ledger",
        default="",
        metavar="RUN",
        help="check only the ledger of this run folder: every image of an epoch was taken exactly once",
    )
    add(
        "--json",
        default="",
        metavar="FILE",
        help="write the report as JSON to FILE; - prints it instead of text",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_until_signal(main, "the doctor is stopped, without a report"))
