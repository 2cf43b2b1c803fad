"""Measure, print the figures, and record them on request.

    python -m horovod_volo.bench loss
    horovodrun -np 2 python -m horovod_volo.bench reduce --model volo_d1 --record
    python -m horovod_volo.bench table

`NAME --help` lists the flags of one benchmark. Only rank 0 prints and records. Exit status: 0 measured, 2 a
user error, reported in one message, 1 any other failure, such as wrong results on either side.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flag
from horovod_volo.config.schema import setting_of_training
from horovod_volo.core.errors import UserError, print_error
from horovod_volo.core.names import nearest

if TYPE_CHECKING:
    from horovod_volo.bench.results import Result

# torch is imported where it is used, so that --help answers at once.

MEASUREMENTS = {
    "step": "speed of a training step, and the fraction of a GPU's peak FLOP/s",
    "peers": "training step against plain and published training loops around timm's VOLO",
    "loss": "sparse token-label loss against its published form",
    "reduce": "exposed time of the gradient all-reduce; start with horovodrun or mpirun",
    "loader": "augmented training images per second against timm's loader",
    "labels": "reading a token-label map against torch.load",
    "ceilings": "what a GPU reaches in copies, matrix products and attention",
    "roofline": "time of a training step on a GPU, counted without one",
    "simulate": "predicted efficiency on many GPUs",
}
REPORTS = {
    "gpu": "measure what one GPU is to be measured for, in parts",
    "profile": "print the operators of a training step, the longest first",
    "table": "print the recorded results as the table of docs/results.md",
}
# Module and function of those that are not `measure` in a module of their own.
_ELSEWHERE = {
    "labels": ("loader", "measure_labels"),
    "ceilings": ("gpu", "measure_ceilings"),
    "profile": ("step", "measure_operators"),
    "table": ("results", "table"),
}
# Whose --model may be a plugin's.
_TAKES_PLUGINS = {"step", "profile", "roofline", "reduce"}


class BenchRequest(NamedTuple):
    """A parsed command line: `function` is to be called with `settings`."""

    name: str
    function: Callable[..., Result | str]
    settings: dict[str, Any]
    json: bool = False
    record: bool = False
    plugin: str = ""


def parse(arguments: list[str]) -> BenchRequest:
    """Read the command line. Only the named benchmark is imported: others may need what is not installed."""
    from horovod_volo.bench.results import add_flags

    name, *flags = arguments
    descriptions = MEASUREMENTS | REPORTS
    if name not in descriptions:
        raise UserError(f"There is no benchmark {name!r}.{nearest(name, descriptions)} --help lists all.")
    module, attribute = _ELSEWHERE.get(name, (name, "measure"))
    function = getattr(import_module(f"horovod_volo.bench.{module}"), attribute)
    parser = Parser(prog=f"python -m horovod_volo.bench {name}", description=descriptions[name])
    add_flags(parser, function)
    if name in MEASUREMENTS:
        parser.add_argument("--json", action="store_true", help="print the record as one JSON object")
        parser.add_argument("--record", action="store_true", help="append the record to docs/results.jsonl")
    if name in _TAKES_PLUGINS:
        add_flag(parser, setting_of_training("plugin"))
    settings = vars(parser.parse_args(flags))
    common = {key: settings.pop(key) for key in ("json", "record", "plugin") if key in settings}
    return BenchRequest(name, function, settings, **common)


def main(arguments: list[str]) -> int:
    """Run one benchmark on this rank; return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    before = os.getloadavg()[0]
    from horovod_volo.bench.results import append, lines, record_of
    from horovod_volo.core.operators import OPERATORS, use_kernels
    from horovod_volo.plugins import load_plugins

    try:
        request = parse(arguments)
        load_plugins(request.plugin)
        use_kernels(OPERATORS)  # those that take steps choose by a check
        found = request.function(**request.settings)
        if isinstance(found, str):
            print(found)
        elif read_launch_env().rank == 0:
            record = record_of(found, _command(arguments), (before, os.getloadavg()[0]))
            print(json.dumps(record) if request.json else lines(record))
            if request.record:
                append(record)
    except UserError as problem:
        print_error(f"error: {problem}")
        return 2
    return 0


def _overview() -> str:
    rows = ["usage: python -m horovod_volo.bench NAME [FLAGS]", "", __doc__.strip(), ""]
    rows += [f"  {name:<14}{description}" for name, description in (MEASUREMENTS | REPORTS).items()]
    return "\n".join(rows)


def _command(arguments: list[str]) -> str:
    """Return the command as it can be typed again, without the flags of output."""
    launch = read_launch_env()
    launcher = [*launch.launcher.split()[:1], "-n" if launch.launcher == "srun" else "-np", str(launch.size)]
    kept = [argument for argument in arguments if argument not in ("--json", "--record")]
    return shlex.join([*(launcher if launch.size > 1 else []), "python", "-m", "horovod_volo.bench", *kept])


if __name__ == "__main__":
    sys.exit(run_until_signal(main, "the benchmark is stopped, and recorded nothing"))
