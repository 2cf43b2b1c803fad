"""Import, generate, verify and show token-label maps.

    horovod-volo labels import /path/to/published /path/to/store --data /path/to/imagenet
    horovodrun -np 8 horovod-volo labels generate /path/to/imagenet /path/to/store --teacher dm_nfnet_f6 ...
    horovod-volo labels verify /path/to/store --data /path/to/imagenet
    horovod-volo labels show /path/to/store /path/to/imagenet n01440764/n01440764_10026 picture.png

Exit status: 0 done; 1 maps are damaged, or another failure; 2 a mistake on the command line,
explained in one message.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_volo.cluster.entry import refuse, run_on_ranks
from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flags, flags_of, whole_number
from horovod_volo.config.schema import setting_of_training
from horovod_volo.core.errors import UserError, escape_controls, list_problems, print_error, refuse_mistakes
from horovod_volo.monitor.progress import ThroughputLine

if TYPE_CHECKING:
    from horovod_volo.cluster.world import World
    from horovod_volo.data.images.catalog import Catalog

DONE, FAILED = 0, 1
IMAGES = setting_of_training("data_dir", help="folder of the training images")

# Each command imports its modules itself, so that --help answers at once.


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit status."""
    try:
        args = build_parser().parse_args(arguments)
    except UserError as problem:
        return refuse(problem)
    if args.command == "generate":
        from horovod_volo.cluster.pinning import bind

        return run_on_ranks(partial(_generate, args), bind(args.binding), flags_of(args))
    commands = {"import": _import, "verify": _verify, "show": _show}
    return refuse_mistakes(commands[args.command])(args)


def _import(args: argparse.Namespace) -> int:
    from horovod_volo.labelling.import_maps import import_labels
    from horovod_volo.token_labels.geometry import MapGeometry

    maps, problems = import_labels(
        args.published,
        args.store,
        _catalog(args.data),
        workers=args.workers or len(os.sched_getaffinity(0)),
        fail_on_bad_samples=args.bad_samples == "fail",
        progress=ThroughputLine("maps"),
        warn=lambda message: print_error(f"warning: {message}"),
        geometry=MapGeometry.parse(args.map_geometry) if args.map_geometry else None,
    )
    list_problems(problems)
    if problems and args.bad_samples == "fail":
        print_error(
            f"error: {len(problems)} of {maps} maps cannot be used; {args.store} is not finished. Repair "
            "them and run the same command again, or leave them out with --bad-samples skip."
        )
        return FAILED
    print(f"{args.store}: {maps - len(problems)} maps, {len(problems)} left out")
    return DONE


def _generate(args: argparse.Namespace, world: World) -> int:
    from horovod_volo.data.image_decoder import decoder_messages
    from horovod_volo.labelling.generate import TeacherChoice, generate_labels
    from horovod_volo.plugins import load_plugins

    world.run_on_all_ranks(partial(load_plugins, args.plugin))
    unit = "images" if world.size == 1 else f"images of rank 0 of {world.size}"
    line = ThroughputLine(unit, shown=world.is_rank_zero)
    teacher = TeacherChoice(
        args.teacher, args.teacher_weights, args.teacher_pretrained, args.img_size, args.batch_size
    )
    images, problems = generate_labels(args.data_dir, args.store, teacher, args.top, world, line)
    if world.is_rank_zero:
        list_problems([*decoder_messages(), *problems])
        print(f"{args.store}: {images - len(problems)} maps, {len(problems)} left out")
    return DONE


def _verify(args: argparse.Namespace) -> int:
    from horovod_volo.labelling.verify import check_store

    catalog = _catalog(args.data) if args.data else None
    report = check_store(args.store, catalog, ThroughputLine("maps"))
    for name, value in report.rows(compared=catalog is not None):
        print(escape_controls(f"{name:<23}{value}"))
    list_problems(report.damage)
    return FAILED if report.damage else DONE


def _show(args: argparse.Namespace) -> int:
    from horovod_volo.labelling.figure import draw_sample

    draw_sample(args.store, _catalog(args.data_dir), args.image, args.picture)
    return DONE


def _catalog(data_dir: str) -> Catalog:
    from horovod_volo.data.images.catalog import build_catalog

    return build_catalog(data_dir, "train", None)


def build_parser() -> Parser:
    """Build the command line."""
    parser = Parser(prog="horovod-volo labels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_import(commands.add_parser("import", help="pack published maps, CLASS/IMAGE.pt, into a store"))
    _add_generate(commands.add_parser("generate", help="label the training images with a teacher"))
    verify = commands.add_parser("verify", help="check a store for damage, and its labels against images")
    verify.add_argument("store", type=Path, metavar="STORE", help="label store")
    data = "compare with its training images (default: verify the store alone)"
    verify.add_argument("--data", default="", metavar="DATA_DIR", help=data)
    show = commands.add_parser("show", help="draw one image with the labels of its cells")
    show.add_argument("store", metavar="STORE", help="store, or folder with CLASS/IMAGE.pt")
    add_flags(show, IMAGES)
    show.add_argument("image", metavar="NAME_OR_INDEX", help="CLASS/IMAGE, or the image's index")
    show.add_argument("picture", type=Path, metavar="OUT.png", help="file to write")
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("published", type=Path, metavar="PT_FOLDER", help="folder with CLASS/IMAGE.pt")
    add("store", type=Path, metavar="STORE", help="folder to create")
    add("--data", required=True, metavar="DATA_DIR", help="folder of the training images; required")
    add_flags(
        parser,
        setting_of_training("workers", help="processes; 0: one per core"),
        setting_of_training(
            "bad_samples",
            default="fail",  # a store is used many times: nothing is left out unasked
            help="leave out damaged and missing maps, or do not finish the store",
        ),
        setting_of_training(
            "map_geometry",
            help="part of its image that a map covers: whole, or centre-crop:RESIZE:SIZE; empty: as "
            "map_geometry.txt in PT_FOLDER says, else assumed, with a note",
        ),
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, IMAGES)
    add = parser.add_argument
    add("store", type=Path, metavar="STORE", help="folder to create, shared by all hosts")
    teacher = "a timm model, a model of this package, or a run folder; required"
    add("--teacher", required=True, metavar="NAME", help=teacher)
    add("--teacher-weights", default="", metavar="FILE", help="file of the teacher's weights")
    pretrained = "load timm's weights, from its cache or the network"
    add("--teacher-pretrained", action="store_true", help=pretrained)
    add("--top", type=whole_number(1), default=5, metavar="N", help="classes per cell (default: %(default)s)")
    add_flags(
        parser,
        setting_of_training("plugin"),
        setting_of_training(
            "img_size",
            default=0,  # training's default is that of the model that is trained
            help="side of the images that the teacher sees, pixels; 0: the teacher's own",
        ),
        setting_of_training("batch_size", help="images per rank and forward pass"),
        setting_of_training("binding"),
    )


if __name__ == "__main__":
    run_until_signal(main, "stopped; the same command resumes an unfinished label store")
