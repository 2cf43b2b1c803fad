"""Pack images into tar shards, which file systems read faster than small files.

    tools/pack /path/to/imagenet /path/to/packed
    tools/pack /path/to/imagenet /path/to/packed256 --resize 256
    tools/pack /path/to/packed --verify

OUT_DIR then holds train/ and val/ with NAME-000000.tar, an index beside each, classes.txt and manifest.json,
and is a data folder like any other. A pack that was killed goes on when the same command is given again.
Exit status: 0 done; 1 images were left out or shards are damaged; 2 a mistake, told in one message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.config.arguments import whole_number
from horovod_volo.core.errors import UserError
from horovod_volo.core.messages import list_problems
from horovod_volo.monitor.progress import ThroughputLine

DONE, DAMAGED, MISTAKE = 0, 1, 2
SPLITS = ("train", "val")
_MB = 10**6

# What a command needs is imported where it runs: --help must answer at once.


def main(arguments: Sequence[str]) -> int:
    """Pack, or verify what was packed; return the exit status."""
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    folders = chosen.folders
    if len(folders) > 2 or (len(folders) < 2 and not chosen.verify):
        parser.error(
            "name the folder of images and the folder to pack into; with --verify the packed one alone"
        )
    try:
        status = DONE if len(folders) == 1 else _pack(folders[0], folders[1], chosen)
        return max(status, _verify(folders[-1], chosen.workers)) if chosen.verify else status
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return MISTAKE


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        prog="tools/pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DATA_DIR OUT_DIR",
        help="the images, and where the shards go",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--shard-size-mb",
        type=whole_number(1),
        default=256,
        metavar="MB",
        help="size of a shard (%(default)s)",
    )
    size.add_argument(
        "--shard-images", type=whole_number(1), default=0, metavar="N", help="instead: images in a shard"
    )
    parser.add_argument(
        "--resize",
        type=whole_number(1),
        default=0,
        metavar="SIDE",
        help="shrink the shorter side of larger images to so many pixels, and save them as JPEG",
    )
    parser.add_argument(
        "--quality",
        type=whole_number(1, 100),
        default=95,
        metavar="Q",
        help="of these JPEGs, 1 to 100 (%(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="(%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order, in which classes are mixed (%(default)s)"
    )
    parser.add_argument("--no-shuffle", action="store_true", help="keep the images' order")
    parser.add_argument(
        "--bad-samples",
        choices=("fail", "skip"),
        default="fail",
        help="images that cannot be decoded are left out; whether that is exit status 1 (%(default)s)",
    )
    parser.add_argument("--verify", action="store_true", help="read all shards again and compare their sums")
    return parser


def _pack(data_dir: Path, out: Path, chosen: argparse.Namespace) -> int:
    from horovod_volo.data.packing.pack import Packing, pack

    packing = Packing(
        shard_images=chosen.shard_images,
        shard_bytes=chosen.shard_size_mb * _MB,
        shorter_side=chosen.resize,
        quality=chosen.quality,
        seed=chosen.seed,
        shuffle=not chosen.no_shuffle,
    )
    try:
        left_out = pack(
            data_dir,
            out,
            packing,
            workers=chosen.workers,
            pace=lambda split: ThroughputLine(f"images of {split}"),
        )
    except OSError as error:
        raise UserError(
            f"cannot pack into {out}: {error}. Mend this and give the same command again: finished "
            "shards are kept."
        ) from error
    list_problems(left_out)
    if left_out:
        print(f"{len(left_out)} images were left out", file=sys.stderr)
    return DAMAGED if left_out and chosen.bad_samples == "fail" else DONE


def _verify(out: Path, workers: int) -> int:
    from horovod_volo.data.packing.manifest import check_split, read_manifest

    problems = []
    for split in SPLITS:
        problems += check_split(out / split, workers=workers, progress=ThroughputLine(f"files of {split}"))
    list_problems(problems)
    for split in SPLITS:
        manifest = read_manifest(out / split)
        print(f"{out / split}: {manifest.images:,} images in {len(manifest.shards):,} shards")
    print("damaged: pack again, or copy these files again" if problems else "all sums are right")
    return DAMAGED if problems else DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
