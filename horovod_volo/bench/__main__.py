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
from horovod_volo.cluster.launch import promised
from horovod_volo.config.arguments import whole_number
from horovod_volo.config.errors import UserError

_OF_EVERY_BENCHMARK = ("name", "json", "record")


def build_parser() -> argparse.ArgumentParser:
    """Build the command line: a word for each benchmark, and `table`."""
    parser = argparse.ArgumentParser(
        prog="python -m horovod_volo.bench",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    words = parser.add_subparsers(dest="name", required=True, metavar="NAME")

    flags = _add(words, "loss", "the sparse token-label loss against its dense formula")
    _number(flags, "--batch-size", 8, "images")
    flags.add_argument("--classes", type=int, nargs="+", default=[1000, 21841], metavar="N")
    _number(flags, "--tokens-per-side", 14, "14 is a 224 px image")

    flags = _add(words, "step", "the speed of a training step, and where its time goes")
    _add_network(flags)
    flags.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")

    flags = _add(words, "reduce", "our reducer against Horovod's optimizer; start with horovodrun")
    _add_network(flags)

    flags = _add(words, "data", "training images a second")
    _add_images(flags)
    _add_data_dir(flags)
    _number(flags, "--batches", 30, "in a block")

    flags = _add(words, "loader", "augmented training images a second against timm's loader")
    _add_images(flags)
    flags.add_argument("--data-dir", default="", help="with train/CLASS/IMAGE; without it images are made")
    _number(flags, "--images", 1024, "made like photographs of 500 x 375")

    flags = _add(words, "labels", "reading a label map against torch.load")
    _number(flags, "--maps", 2000, "made for this")

    flags = _add(words, "catalog", "start-up on many images, and the memory they hold in each rank")
    _number(flags, "--images", 1281167, "made for this, as links")
    _number(flags, "--classes", 1000, "class folders")

    flags = _add(words, "soak", "whether memory and open files grow", in_pairs=False)
    _add_images(flags)
    _add_data_dir(flags)
    flags.add_argument("--token-label-data", default="", metavar="DIR", help="label maps, if any")
    flags.add_argument("--minutes", type=float, default=10.0, metavar="N", help="(%(default)s)")

    words.add_parser("table", help="print the recorded results as the README's table")
    return parser


def _add(
    words: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help: str,
    *,
    in_pairs: bool = True,
) -> argparse.ArgumentParser:
    flags = words.add_parser(name, help=help, description=help)
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_argument("--record", action="store_true", help="append it to docs/results.jsonl")
    if in_pairs:
        flags.add_argument(
            "--pairs",
            type=whole_number(2, because=": one pair has no spread"),
            default=7,
            metavar="N",
            help="blocks of each side (%(default)s)",
        )
    return flags


def _add_network(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--model", default="volo_d1", help="(%(default)s)")
    _number(flags, "--img-size", 224, "pixels")
    _number(flags, "--batch-size", 8, "images a rank")


def _add_data_dir(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--data-dir", default="data/demo", help="with train/CLASS/IMAGE (%(default)s)")


def _add_images(flags: argparse.ArgumentParser) -> None:
    _number(flags, "--img-size", 64, "side of the images given, pixels")
    _number(flags, "--batch-size", 32, "images")
    _number(flags, "--threads", 0, "data threads; 0: as many as cores")


def _number(flags: argparse.ArgumentParser, name: str, default: int, help: str) -> None:
    flags.add_argument(name, type=int, default=default, metavar="N", help=f"{help} (%(default)s)")


def main(arguments: list[str]) -> int:
    """Run one benchmark on this rank; return its exit status."""
    chosen = build_parser().parse_args(arguments or ["--help"])
    if chosen.name == "table":
        print(table.markdown(read_records()))
        return 0
    load_before = os.getloadavg()[0]
    try:
        result = _measured(chosen)
        if promised().rank == 0:
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
    place = promised()
    launcher = [*place.launcher.split()[:1], "-n" if place.launcher == "srun" else "-np", str(place.size)]
    kept = [argument for argument in arguments if argument not in ("--json", "--record")]
    return shlex.join([*(launcher if place.size > 1 else []), "python", "-m", "horovod_volo.bench", *kept])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
