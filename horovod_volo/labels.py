"""Make, check and look at token labels.

    tools/labels import /path/to/published /path/to/store --data /path/to/imagenet
    horovodrun -np 8 tools/labels generate /path/to/imagenet /path/to/store --teacher dm_nfnet_f6 ...
    tools/labels verify /path/to/store --data /path/to/imagenet --teacher dm_nfnet_f6 --teacher-pretrained
    tools/labels show /path/to/store /path/to/imagenet n01440764/n01440764_10026 picture.png

Exit status: 0 done; 1 something is damaged or missing, the maps cover another part of their images than is
recorded, or another failure; 2 a mistake in the request, told in one message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_volo.config.arguments import add_binding, whole_number
from horovod_volo.core.errors import UserError
from horovod_volo.core.messages import list_problems
from horovod_volo.monitor.pace import ThroughputLine

if TYPE_CHECKING:
    from horovod_volo.cluster.world import World
    from horovod_volo.data.images.catalog import Catalog
    from horovod_volo.data.labels.check import Found
    from horovod_volo.data.labels.geometry import MapGeometry
    from horovod_volo.data.labels.store import StoreFacts

DONE, FAILED, MISTAKE = 0, 1, 2

# What a command needs is imported where it runs: --help must answer at once.


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit status."""
    chosen = build_parser().parse_args(arguments)
    if chosen.command == "generate":
        return _generate(chosen)
    commands = {"import": _import, "verify": _verify, "show": _show}
    try:
        return commands[chosen.command](chosen)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return MISTAKE


def _import(chosen: argparse.Namespace) -> int:
    from horovod_volo.data.labels.import_maps import import_labels

    geometry = _geometry(chosen.map_geometry)
    catalog = _catalog(chosen.data) if chosen.data else None
    maps, problems = import_labels(
        chosen.published,
        chosen.store,
        catalog,
        classes=chosen.classes,
        workers=chosen.workers or len(os.sched_getaffinity(0)),
        bad_samples_end_it=chosen.bad_samples == "fail",
        progress=ThroughputLine("maps"),
        tell=lambda remark: print(f"note: {remark}", file=sys.stderr),
        geometry=geometry,
    )
    list_problems(problems)
    if problems and chosen.bad_samples == "fail":
        print(
            f"error: {len(problems)} of {maps} maps cannot be used; {chosen.store} is not finished. Mend "
            "them and give the same command again, or leave them out with --bad-samples skip.",
            file=sys.stderr,
        )
        return FAILED
    print(f"{chosen.store}: {maps - len(problems)} maps, {len(problems)} left out")
    return DONE


def _generate(chosen: argparse.Namespace) -> int:
    from horovod_volo.cluster.pinning import bind

    bound = bind(chosen.binding)
    from horovod_volo.cluster.entry import run_on_ranks

    return run_on_ranks(partial(_label, chosen), bound)


def _label(chosen: argparse.Namespace, world: World) -> int:
    from horovod_volo.labelling.generate import Order, label_images

    order = Order(
        data_dir=chosen.data_dir,
        store=chosen.store,
        teacher=chosen.teacher,
        weights=chosen.teacher_weights,
        pretrained=chosen.teacher_pretrained,
        image_side=chosen.img_size,
        batch=chosen.batch_size,
        top=chosen.top,
    )
    whose = "images" if world.size == 1 else f"images of rank 0 of {world.size}"
    images, problems = label_images(order, world, ThroughputLine(whose, shown=world.is_rank_zero))
    if world.is_rank_zero:
        list_problems(problems)
        print(f"{chosen.store}: {images - len(problems)} maps, {len(problems)} left out")
    return DONE


def _verify(chosen: argparse.Namespace) -> int:
    from horovod_volo.data.labels.check import check_store
    from horovod_volo.data.labels.store import is_store

    if chosen.teacher and not chosen.data:
        raise UserError("--teacher labels images to compare with: give --data DATA_DIR as well.")
    catalog = _catalog(chosen.data) if chosen.data else None
    damage: list[str] = []
    if is_store(chosen.store) or not chosen.teacher:  # a teacher is asked of published maps too
        found = check_store(chosen.store, catalog, ThroughputLine("maps"))
        print(_table(found, compared=catalog is not None))
        list_problems(found.damage)
        damage = found.damage
    lies_elsewhere = catalog is not None and bool(chosen.teacher) and _lies_elsewhere(chosen, catalog)
    return FAILED if damage or lies_elsewhere else DONE


def _lies_elsewhere(chosen: argparse.Namespace, catalog: Catalog) -> bool:
    """Print how maps fit a teacher; say whether they fit it better otherwise than they are recorded."""
    from horovod_volo.labelling.map_geometry import Comparison, compare_geometries

    asked = Comparison(
        labels=chosen.store,
        geometry=_geometry(chosen.map_geometry),
        teacher=chosen.teacher,
        weights=chosen.teacher_weights,
        pretrained=chosen.teacher_pretrained,
        image_side=chosen.img_size,
        batch=chosen.batch_size,
        images=chosen.images,
    )
    fit = compare_geometries(asked, catalog, ThroughputLine("images"))
    recorded, other = fit.means
    told = "assumed" if fit.assumed else "stated" if chosen.map_geometry else "recorded"
    lines = [
        ("compared with", fit.teacher),
        ("images that tell", f"{len(fit.correlations)}"),
        (f"{fit.recorded}", f"correlation {recorded:.3f}, as is {told}"),
        (f"{fit.other}", f"correlation {other:.3f}"),
        ("fits better", "cannot be told: take more --images" if fit.better is None else f"{fit.better}"),
    ]
    print(_columns(lines))
    if fit.better != fit.other:
        return False
    print(
        f"error: the maps cover {fit.other.described}, not {fit.recorded.described}. Import them again with "
        f"--map-geometry {fit.other}, or train with it.",
        file=sys.stderr,
    )
    return True


def _geometry(text: str) -> MapGeometry | None:
    from horovod_volo.data.labels.geometry import MapGeometry

    return MapGeometry.parse(text) if text else None


def _table(found: Found, *, compared: bool) -> str:
    facts = found.facts
    lines = [
        ("maps", f"{facts.maps - found.missing}, and {found.missing} rows without a map"),
        ("of a map", f"{facts.top} classes in {facts.height} x {facts.width} cells"),
        ("classes", f"{facts.classes}, numbers kept as {facts.ids}"),
        ("teacher", facts.teacher),
        ("a map covers", _coverage(facts)),
        ("shards", f"{len(facts.shards)}"),
    ]
    if compared:
        share = 100 * found.agreeing / max(1, found.with_image)
        lines += [
            ("images without a map", f"{found.images_without_map}"),
            ("maps without an image", f"{found.maps_without_image}"),
            (
                "agreement",
                f"{share:.2f} % of {found.with_image} maps: the class most probable over all cells",
            ),
            ("", "is the image's folder"),
        ]
    lines.append(("damage", f"{len(found.damage)} found" if found.damage else "none"))
    return _columns(lines)


def _coverage(facts: StoreFacts) -> str:
    from horovod_volo.data.labels.geometry import MapGeometry, coverage

    return coverage(MapGeometry.parse(facts.geometry), assumed=facts.geometry_assumed)


def _columns(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<23}{value}" for name, value in lines)


def _show(chosen: argparse.Namespace) -> int:
    from horovod_volo.data.labels.view import draw_sample

    catalog = _catalog(chosen.data_dir)
    draw_sample(chosen.store, catalog, chosen.image, chosen.picture)
    return DONE


def _catalog(data_dir: str) -> Catalog:
    from horovod_volo.data.images.catalog import build_catalog

    return build_catalog(data_dir, "train", None)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        prog="tools/labels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    flags = words.add_parser("import", help="pack the published maps, CLASS/IMAGE.pt, into a store")
    flags.add_argument("published", type=Path, metavar="PT_FOLDER", help="folder that holds CLASS/IMAGE.pt")
    flags.add_argument("store", type=Path, metavar="STORE", help="folder to make")
    flags.add_argument("--data", default="", metavar="DATA_DIR", help="pack the maps of these images only")
    flags.add_argument(
        "--classes", type=whole_number(1), default=0, metavar="N", help="default: the class folders"
    )
    flags.add_argument("--workers", type=whole_number(1), default=0, metavar="N", help="default: the cores")
    flags.add_argument(
        "--bad-samples",
        choices=("fail", "skip"),
        default="fail",
        help="what becomes of the store if a map is damaged or missing (%(default)s)",
    )
    _add_geometry(flags, "default: as map_geometry.txt in PT_FOLDER says, else assumed and told")

    flags = words.add_parser("generate", help="label the training images with a teacher, on one rank or many")
    flags.add_argument("data_dir", metavar="DATA_DIR", help="folder that holds the training images")
    flags.add_argument("store", type=Path, metavar="STORE", help="folder to make, seen by all hosts")
    _add_teacher(flags, required=True)
    flags.add_argument(
        "--top", type=whole_number(1), default=5, metavar="N", help="classes kept in a cell (%(default)s)"
    )
    add_binding(flags)

    flags = words.add_parser("verify", help="check that a store is whole, and whether its teacher is right")
    flags.add_argument(
        "store", type=Path, metavar="STORE", help="with --teacher also a folder that holds CLASS/IMAGE.pt"
    )
    flags.add_argument("--data", default="", metavar="DATA_DIR", help="compare with the training images here")
    _add_teacher(flags, required=False)
    flags.add_argument(
        "--images",
        type=whole_number(2, because=": one has no spread"),
        default=64,
        metavar="N",
        help="to compare with the teacher, spread over DATA_DIR (%(default)s)",
    )
    _add_geometry(flags, "to compare with the teacher; default: as recorded")

    flags = words.add_parser("show", help="draw one image and the labels of its parts")
    flags.add_argument("store", metavar="STORE", help="a store, or a folder that holds CLASS/IMAGE.pt")
    flags.add_argument("data_dir", metavar="DATA_DIR", help="folder that holds the training images")
    flags.add_argument("image", metavar="NAME_OR_INDEX", help="CLASS/IMAGE, or its place in the catalog")
    flags.add_argument("picture", type=Path, metavar="OUT.png", help="file to write")
    return parser


def _add_geometry(flags: argparse.ArgumentParser, usual: str) -> None:
    flags.add_argument(
        "--map-geometry",
        default="",
        metavar="whole|centre-crop:RESIZE:SIZE",
        help=f"what a map covers of its image; {usual}",
    )


def _add_teacher(flags: argparse.ArgumentParser, *, required: bool) -> None:
    whose = "a model of timm or of ours, or the folder of a run"
    usual = whose if required else f"{whose}: tests which part of its image a map covers"
    flags.add_argument("--teacher", required=required, default="", metavar="NAME", help=usual)
    flags.add_argument("--teacher-weights", default="", metavar="FILE", help="its weights")
    flags.add_argument(
        "--teacher-pretrained", action="store_true", help="take timm's weights, from its cache or the network"
    )
    flags.add_argument(
        "--img-size", type=whole_number(32), default=0, metavar="N", help="default: what suits the teacher"
    )
    flags.add_argument("--batch-size", type=whole_number(1), default=32, metavar="N", help="(%(default)s)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
