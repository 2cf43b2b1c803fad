"""Check the installation, each host, and the connections between ranks.

    horovod-volo doctor
    horovodrun -np 8 horovod-volo doctor --shared /path/to/runs
    mpirun --np 2 --bind-to none --map-by slot horovod-volo doctor --json -
    horovod-volo doctor --ledger runs/volo_d1

Start it with the launcher and flags of training. Rank 0 prints one report for all ranks. Exit status: 0 no
failure; 1 a failure; 2 a mistake on the command line.
"""

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.entry import refuse
from horovod_volo.cluster.launch_env import LaunchEnv, read_launch_env
from horovod_volo.cluster.pinning import bind
from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flags
from horovod_volo.config.schema import setting_of_training
from horovod_volo.core.atomic_file import write_text
from horovod_volo.core.errors import MISTAKE, UserError, print_error
from horovod_volo.doctor import host, installation
from horovod_volo.doctor.report import Check, Finding, build_report, format_report, ok, run_check

DONE, FAILED = 0, 1
STDOUT = "-"
_OTHERS_REPORT_SECONDS = 10.0


def main(arguments: Sequence[str]) -> int:
    """Run one rank; return its exit status."""
    try:
        options = build_parser().parse_args(arguments)
    except UserError as error:
        with suppress(Exception):  # ranks that cannot connect each print it
            return refuse(error)
        print_error(f"error: {error}")
        return MISTAKE
    if options.ledger:
        return _check_ledger(Path(options.ledger))
    launch = read_launch_env()
    binding = bind(options.binding)  # before torch is imported, as in training
    own = _check_this_rank(launch, binding)
    from horovod_volo.doctor.between_ranks import collect_findings

    collected = collect_findings(own, binding, Path(options.shared))
    world, problem, status = collected.world, collected.problem, FAILED
    by_rank = collected.by_rank or [own]
    if launch.rank == 0:
        by_rank[0][:0] = [problem] if problem else []
        hosts, controller = collected.hosts or [os.uname().nodename], world.controller if world else "none"
        status = _publish(build_report(launch, by_rank, hosts, controller), options.json)
    elif problem:  # rank 0 has this rank's findings if they were collected
        for finding in [problem] if collected.by_rank else [problem, *own]:
            if finding.level == "failure":
                print_error(f"rank {launch.rank}: {finding.subject}: {finding.text}. {finding.remedy}")
    if world and not problem:
        # The launcher kills all ranks when the first one exits: wait until the report is out.
        return int(world.broadcast_object(status))
    if launch.size > 1:
        # Ranks that are not connected need some time to print, and the launcher may end this one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_OTHERS_REPORT_SECONDS)
    # The collecting thread may be waiting inside Horovod, and nothing can interrupt it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _check_this_rank(launch: LaunchEnv, binding: Binding) -> list[Finding]:
    checks: dict[str, Check] = {
        "python": lambda: [ok(platform.python_version())],
        "torch": installation.check_torch,
        "horovod": installation.check_horovod,
        "dali": installation.check_dali,
        "timm": installation.check_timm,
        "apex": installation.check_apex,
        "gpu": installation.check_gpus,
        "gpudirect": installation.check_rdma,
        "topology": host.check_topology,
        "binding": partial(host.check_binding, binding),
        "memory": partial(host.check_memory, launch.local_size),
        "/dev/shm": partial(host.check_shared_memory, launch.local_size, bool(binding.gpu)),
        "open files": partial(host.check_open_files, launch.size),
        "network": host.check_interfaces,
        "environment": host.check_command_lines,
    }
    return [finding for subject, check in checks.items() for finding in run_check(subject, check)]


def _check_ledger(run: Path) -> int:
    try:
        print(import_module("horovod_volo.elastic.ledger").check_ledger(run))
    except UserError as error:
        print_error(f"error: {error}")
        return FAILED
    return DONE


def _publish(report: dict[str, Any], json_file: str) -> int:
    """Print the report and write its JSON; return the exit status."""
    record = json.dumps(report, indent=2) + "\n"
    print(record if json_file == STDOUT else f"{format_report(report)}\n", end="", flush=True)
    if json_file not in ("", STDOUT):
        try:
            write_text(Path(json_file), record, "--json")
        except UserError as error:
            print_error(f"error: {error}")
            return MISTAKE
    return FAILED if report["failures"] else DONE


def build_parser() -> Parser:
    """Build the command line."""
    parser = Parser(prog="horovod-volo doctor", description=__doc__)
    add = parser.add_argument
    shared = "folder of results, which all ranks must share: --output of training (%(default)s)"
    add("--shared", default="runs", metavar="DIR", help=shared)
    add_flags(parser, setting_of_training("binding"))
    ledger = "check only the ledger of this run folder: every image of an epoch was taken exactly once"
    add("--ledger", default="", metavar="RUN", help=ledger)
    json_file = "write the report as JSON to FILE; - prints it instead of text"
    add("--json", default="", metavar="FILE", help=json_file)
    return parser


if __name__ == "__main__":
    run_until_signal(main, "the doctor is stopped, without a report")
