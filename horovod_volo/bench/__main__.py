"""Measure and tell.

    python -m horovod_volo.bench loss
    horovodrun -np 2 python -m horovod_volo.bench reduce --model volo_d1 --record
    python -m horovod_volo.bench table

Rank 0 alone prints and records. Exit status: 0 measured, 2 a mistake in the request, told in one
message, 1 anything else, a wrong result of ours or of the peer's among them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from importlib import import_module

from horovod_volo.bench import table
from horovod_volo.bench.results import Result, append, read_records, record_of
from horovod_volo.bench.words import add_words
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import UserError

_OF_EVERY_BENCHMARK = ("name", "json", "record")


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: a word for each benchmark, and `table`."""
    parser = argparse.ArgumentParser(
        prog="python -m horovod_volo.bench",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    words = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    add_words(words)
    flags = words.add_parser("table", help="print the recorded results as the table of docs/results.md")
    flags.add_argument("--headlines", action="store_true", help="as the README's, which is shorter")
    return parser


def main(arguments: list[str]) -> int:
    """Run one benchmark on this rank; return its exit status."""
    chosen = build_parser().parse_args(arguments or ["--help"])
    if chosen.name == "table":
        print(table.markdown(read_records(), table.HEADLINES if chosen.headlines else ()))
        return 0
    load_before = os.getloadavg()[0]
    try:
        result = _measured(chosen)
        if read_launch_env().rank == 0:
            record = record_of(result, _command(arguments), (load_before, os.getloadavg()[0]))
            print(json.dumps(record) if chosen.json else table.lines(record))
            if chosen.record:
                append(record)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def _measured(chosen: argparse.Namespace) -> Result:
    """Run `measure` of the module that is named as the benchmark; its settings are named as the flags."""
    settings = {name: value for name, value in vars(chosen).items() if name not in _OF_EVERY_BENCHMARK}
    # Imported where it is chosen: each brings in what the others need not have.
    result: Result = import_module(f"horovod_volo.bench.{chosen.name}").measure(**settings)
    return result


def _command(arguments: list[str]) -> str:
    """Write the command as it can be typed again; that it was recorded is no part of it."""
    place = read_launch_env()
    launcher = [*place.launcher.split()[:1], "-n" if place.launcher == "srun" else "-np", str(place.size)]
    kept = [argument for argument in arguments if argument not in ("--json", "--record")]
    return shlex.join([*(launcher if place.size > 1 else []), "python", "-m", "horovod_volo.bench", *kept])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
