"""Pack images into tar shards, which parallel file systems read faster than small files.

    horovod-volo pack /path/to/imagenet /path/to/packed
    horovod-volo pack /path/to/imagenet /path/to/packed256 --resize 256
    horovod-volo pack /path/to/packed --verify
    horovod-volo pack /path/to/shards --catalog
    horovod-volo pack /path/to/records /path/to/packed --from tfrecord

OUT_DIR is a data folder for training: train/ and val/ with NAME-000000.tar, their indexes, classes.txt and
manifest.json. Images with masks are packed for segmentation, unchanged and in order, each beside its mask.
If the command was killed, run it again to resume.
Exit status: 0 done; 1 images were left out or shards are damaged; 2 a mistake on the command line, explained
in one message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser, add_flags
from horovod_volo.config.schema import setting_of_training
from horovod_volo.config.setting import Setting
from horovod_volo.core.errors import UserError, list_problems, refuse_mistakes
from horovod_volo.monitor.progress import ThroughputLine

if TYPE_CHECKING:
    from horovod_volo.data.images.split_folder import Split

DONE, DAMAGED = 0, 1
SPLITS: tuple[Split, ...] = ("train", "val")
_MB = 10**6

# Each command imports its modules itself, so that --help answers at once.


@refuse_mistakes
def main(arguments: Sequence[str]) -> int:
    """Pack, verify, or both; return the exit status."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    folders = args.folders
    if len(folders) > 2 or (len(folders) < 2 and not (args.verify or args.catalog)):
        parser.error("give DATA_DIR and OUT_DIR, or only a packed folder with --verify or --catalog")
    workers = args.workers or len(os.sched_getaffinity(0))
    status = DONE if len(folders) == 1 else _pack(folders[0], folders[1], args, workers)
    if args.catalog:
        _publish_catalogs(folders[-1])
    return max(status, _verify(folders[-1], workers)) if args.verify else status


def build_parser() -> Parser:
    """Build the command line."""
    parser = Parser(prog="horovod-volo pack", description=__doc__)
    add = parser.add_argument
    folders = "folder of images, and folder to create"
    add("folders", nargs="+", type=Path, metavar="DATA_DIR OUT_DIR", help=folders)
    number, size = partial(Setting, kind=int, at_least=1), parser.add_mutually_exclusive_group()
    images = "images per shard, instead of a size; 0: as --shard-size-mb says"
    add_flags(size, number(name="shard_size_mb", default=256, help="size of a shard, MB"))
    add_flags(size, number(name="shard_images", default=0, help=images))
    resize = "shrink larger images to this shorter side, pixels, and encode them as JPEG; 0: do not"
    status = "exit status if undecodable images were left out; fail: 1, skip: 0"
    add_flags(
        parser,
        number(name="resize", default=0, help=resize),
        number(name="quality", default=95, below=101, help="JPEG quality of --resize, 1 to 100"),
        setting_of_training("workers", help="processes; 0: one per core"),
        setting_of_training("seed", default=0, help="seed of the shuffled order"),
        setting_of_training("bad_samples", default="fail", help=status),
    )
    records = "convert shards of this format (MXNet's RecordIO, TFRecord as of ImageNet)"
    add("--from", dest="records", choices=("tfrecord", "recordio"), help=records)
    add("--no-shuffle", action="store_true", help="keep the order of the images, class by class")
    add("--catalog", action="store_true", help="list the images of shards, to read these from a server")
    add("--verify", action="store_true", help="read all shards and compare their checksums")
    return parser


def _pack(data_dir: Path, out: Path, args: argparse.Namespace, workers: int) -> int:
    from horovod_volo.data.packing.pack import PackOptions, pack
    from horovod_volo.data.packing.packed_split import PACKERS

    masks, left_out = "images with masks", list[str]()
    sizes = {"shard_images": args.shard_images, "shard_bytes": args.shard_size_mb * _MB}
    common: dict[str, Any] = {"workers": workers}
    common["progress"] = lambda split: ThroughputLine(f"images of {split}")
    try:
        if PACKERS.has_extra(masks) and not args.records and PACKERS.find(masks).fits(data_dir):
            if args.resize:
                raise UserError(f"{data_dir} has masks, and such images are packed unchanged. Drop --resize.")
            PACKERS.find(masks).pack(data_dir, out, **sizes, **common)
        else:
            how = {"quality": args.quality, "seed": args.seed, "shuffle": not args.no_shuffle}
            options = PackOptions(**sizes, **how, shorter_side=args.resize)
            left_out = pack(data_dir, out, options, records=args.records, **common)
    except OSError as error:
        remedy = "Correct this and run the same command again: finished shards are reused."
        raise UserError(f"cannot pack into {out}: {error}. {remedy}") from error
    list_problems(left_out)
    if left_out:
        remedy = f"Once they can be read, remove {out} and pack again."
        print(f"{len(left_out)} images were left out. {remedy}", file=sys.stderr)
    return DAMAGED if left_out and args.bad_samples == "fail" else DONE


def _publish_catalogs(folder: Path) -> None:
    from horovod_volo.data.packing.manifest import publish_catalog

    for split in SPLITS:
        try:
            shards = publish_catalog(str(folder), split)
        except OSError as error:
            raise UserError(f"cannot list the images of {folder}: {error}. Correct this.") from error
        print(f"{folder}: the images of {shards:,} shards of {split} are listed")


def _verify(out: Path, workers: int) -> int:
    from horovod_volo.data.packing.manifest import check_split, read_manifest

    problems = []
    for split in SPLITS:
        problems += check_split(out / split, workers=workers, progress=ThroughputLine(f"files of {split}"))
    list_problems(problems)
    for split in SPLITS:
        manifest = read_manifest(out / split)
        print(f"{out / split}: {manifest.images:,} images in {len(manifest.shards):,} shards")
    print("damaged: copy these files again, or pack again" if problems else "all checksums match")
    return DAMAGED if problems else DONE


if __name__ == "__main__":
    outcome = "stopped; finished shards are kept, and the same command packs the others"
    run_until_signal(main, outcome)
