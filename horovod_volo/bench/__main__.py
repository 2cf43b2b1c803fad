"""Measure, print the figures, and record them on request.

    horovod-volo bench loader
    horovodrun -np 2 horovod-volo bench reduce --model volo_d1 --record
    horovod-volo bench table

`NAME --help` lists the flags of one benchmark. Only rank 0 prints and records. Exit status: 0 measured, 2 a
user error, reported in one message, 1 any other failure, such as wrong results on either side.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flag
from horovod_volo.config.schema import setting_of_training
from horovod_volo.core.errors import UserError, refuse_mistakes
from horovod_volo.core.names import nearest

if TYPE_CHECKING:
    from horovod_volo.bench.results import Result

# torch is imported where it is used, so that --help answers at once.

# Where it is, and what it does: a function that returns a Result measures, others report.
BENCHMARKS = {
    "step": ("step.measure", "speed of a training step, and the fraction of a GPU's peak FLOP/s"),
    "peers": ("peers.measure", "training step against plain loops around timm's VOLO"),
    "reduce": ("reduce.measure", "exposed time of the gradient all-reduce; start with horovodrun or mpirun"),
    "loader": ("loader.measure", "augmented training images per second against timm's loader"),
    "ceilings": ("gpu.measure_ceilings", "what a GPU reaches in copies, matrix products and attention"),
    "simulate": ("simulate.measure", "predicted efficiency on many GPUs"),
    "gpu": ("gpu.measure", "measure what one GPU is to be measured for, in parts"),
    "race": ("race.measure", "wall time to an accuracy, against timm's train.py"),
    "table": ("results.table", "print the recorded results as the table of docs/results.md"),
}
_TAKES_PLUGINS = {"step", "reduce"}  # whose --model may be a plugin's


def parse(arguments: list[str]) -> tuple[Callable[..., Result | str], dict[str, Any], dict[str, Any]]:
    """Return the function that a command line names, its parameters, and what to do besides.

    Only the named benchmark is imported: others may need what is not installed.
    """
    from horovod_volo.bench.results import add_flags

    name, *flags = arguments
    if name not in BENCHMARKS:
        raise UserError(f"There is no benchmark {name!r}.{nearest(name, BENCHMARKS)} --help lists all.")
    place, description = BENCHMARKS[name]
    module, attribute = place.split(".")
    function = getattr(import_module(f"horovod_volo.bench.{module}"), attribute)
    parser = Parser(prog=f"horovod-volo bench {name}", description=description)
    add_flags(parser, function)
    if name in _TAKES_PLUGINS:
        add_flag(parser, setting_of_training("plugin"))
    settings = vars(parser.parse_args(flags))
    common = {key: settings.pop(key, "") for key in ("json", "record", "plugin")}
    return function, settings, common


@refuse_mistakes
def main(arguments: list[str]) -> int:
    """Run one benchmark on this rank; return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = [f"  {name:<14}{description}" for name, (_, description) in BENCHMARKS.items()]
        print("usage: horovod-volo bench NAME [FLAGS]", "", __doc__.strip(), "", *listed, sep="\n")
        return 0
    before = os.getloadavg()[0]
    from horovod_volo.bench.results import append, lines, record_of
    from horovod_volo.core.operators import OPERATORS, use_kernels
    from horovod_volo.plugins import load_plugins

    function, settings, common = parse(arguments)
    load_plugins(common["plugin"])
    use_kernels(OPERATORS)  # those that take steps choose by a check
    found = function(**settings)
    if isinstance(found, str):
        print(found)
    elif read_launch_env().rank == 0:
        record = record_of(found, _command(arguments), (before, os.getloadavg()[0]))
        print(json.dumps(record) if common["json"] else lines(record))
        if common["record"]:
            append(record)
    return 0


def _command(arguments: list[str]) -> str:
    """Return the command as it can be typed again, without the flags of output."""
    launch = read_launch_env()
    launcher = [*launch.launcher.split()[:1], "-n" if launch.launcher == "srun" else "-np", str(launch.size)]
    kept = [argument for argument in arguments if argument not in ("--json", "--record")]
    return shlex.join([*(launcher if launch.size > 1 else []), "python", "-m", "horovod_volo.bench", *kept])


if __name__ == "__main__":
    run_until_signal(main, "the benchmark is stopped, and recorded nothing")
