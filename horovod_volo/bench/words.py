"""The benchmarks' words on the command line, and each one's flags."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from horovod_volo.config.arguments import whole_number

Words: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_words(words: Words) -> None:
    """Add a word for each benchmark; its flags are called as the parameters of its `measure`."""
    _of_the_step(words)
    _of_its_parts(words)
    _of_the_ring(words)
    _of_many_ranks(words)
    _of_the_data(words)
    _of_learning(words)


def _of_the_step(words: Words) -> None:
    flags = _add(words, "step", "the speed of a training step, and where its time goes")
    _add_network(flags)
    flags.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")

    flags = _add(words, "peers", "a training step against the loops that people train VOLO with")
    _add_network(flags)
    flags.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    flags.add_argument("--drop-path", type=float, default=0.1, metavar="RATE", help="(%(default)s)")
    flags.add_argument(
        "--against",
        nargs="+",
        choices=("eager", "channels-last", "compile", "published"),
        default=["eager", "channels-last", "published"],
    )

    flags = _add(words, "growth", "a step's cost as resolution, classes and batch grow", in_pairs=False)
    flags.add_argument("--model", default="volo_d1", help="(%(default)s)")
    flags.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    flags.add_argument("--sides", type=int, nargs="+", default=[128, 160, 192, 288], metavar="N")
    flags.add_argument("--classes", type=int, nargs="+", default=[21841], metavar="N")
    flags.add_argument("--batches", type=int, nargs="+", default=[1, 2], metavar="N")
    _number(flags, "--rounds", 5, "of all cases")

    flags = _add(words, "gpu", "the engine's step on one rank, and how much of a GPU it uses")
    _add_network(flags)
    flags.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    flags.add_argument("--drop-path", type=float, default=0.1, metavar="RATE", help="(%(default)s)")
    flags.add_argument("--compile", action="store_true", help="with blocks compiled")

    flags = _add(words, "overhead", "what the engine's step costs beyond torch's operations")
    _number(flags, "--batch-size", 8, "images")


def _of_its_parts(words: Words) -> None:
    flags = _add(words, "outlook", "outlook attention, its core and the module, against timm's")
    _number(flags, "--batch-size", 4, "images")
    flags.add_argument("--channels", type=int, nargs="+", default=[192, 384], metavar="N")
    _number(flags, "--side", 28, "pixels of the stem's grid; 28 is a 224 px image")
    flags.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")

    flags = _add(words, "loss", "the sparse token-label loss against its published and its dense form")
    flags.add_argument("--classes", type=int, nargs="+", default=[1000, 21841], metavar="N")
    usual = "images; what is beyond the first number is measured with the first number of classes alone"
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[8], metavar="N", help=usual)
    _number(flags, "--tokens-per-side", 14, "14 is a 224 px image")

    flags = _add(words, "optimizer", "clip, AdamW and averaged weights against timm's")
    flags.add_argument("--model", default="volo_d1", help="(%(default)s)")


def _of_the_ring(words: Words) -> None:
    flags = _add(words, "reduce", "what is left to wait for of the exchange; start with horovodrun")
    _add_network(flags, batch_size=4)
    _add_other_ways(flags)

    flags = _add(words, "overlap", "the same on a slow link, made on this machine for two ranks; takes root")
    _add_network(flags, batch_size=4)
    _number(flags, "--link", 1000, "megabits a second")
    _add_other_ways(flags)

    flags = _add(words, "scaling", "a parameter server against the ring, and steps of 1, 2 and 4 ranks")
    flags.add_argument("--mib", type=float, default=8.0, metavar="N", help="of the gradient (%(default)s)")
    flags.add_argument(
        "--mbit",
        type=float,
        default=200.0,
        metavar="N",
        help="megabits a second of each host's link, which takes root; 0: this machine alone (%(default)s)",
    )
    flags.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8], metavar="N")
    flags.add_argument("--steps-of", default="volo_demo", metavar="MODEL", help='"": none (%(default)s)')
    _number(flags, "--img-size", 64, "pixels")
    _number(flags, "--batch-size", 16, "images a rank")

    flags = _add(words, "compression", "what fp16 makes of gradients, tensor by tensor", in_pairs=False)
    flags.add_argument("--model", default="volo_d1", help="(%(default)s)")
    _number(flags, "--img-size", 224, "pixels")
    _number(flags, "--batch-size", 1, "images a rank")
    _number(flags, "--classes", 1000, "of the network, of which the images show the first few")
    _number(flags, "--steps", 10, "of training before it")
    flags.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 40], metavar="N", help="emulated")
    _add_data_dir(flags)
    forms = ["fp16", "fp16-all", "fp16-fixed", "fp16-halves", "bf16"]
    flags.add_argument("--forms", nargs="+", choices=forms, default=forms)


def _of_many_ranks(words: Words) -> None:
    flags = _add(words, "simulate", "the efficiency of many GPUs, computed", in_pairs=False)
    flags.add_argument("--models", nargs="+", default=["volo_d1", "volo_d5"], metavar="MODEL")
    flags.add_argument("--fabrics", nargs="+", default=["a100-hdr", "h200-ndr", "a100-25gbe"], metavar="NAME")
    flags.add_argument("--ranks", type=int, nargs="+", default=[8, 40, 256, 1024, 10_000], metavar="N")
    _number(flags, "--img-size", 112, "pixels of the backward that is measured here")
    flags.add_argument(
        "--negotiation-us",
        type=float,
        default=100.0,
        metavar="N",
        help="for all ranks to agree on a message, times log2 of the ranks (%(default)s)",
    )
    flags.add_argument(
        "--cycle-ms", type=float, default=1.0, metavar="N", help="HOROVOD_CYCLE_TIME (%(default)s)"
    )
    flags.add_argument(
        "--sigma",
        type=float,
        default=0.005,
        metavar="N",
        help="spread of a rank's step, a share (%(default)s)",
    )
    flags.add_argument("--figures", default="", metavar="DIR", help="also draw charts into this folder")


def _of_the_data(words: Words) -> None:
    flags = _add(words, "data", "training images a second")
    _add_images(flags)
    _add_data_dir(flags)
    _number(flags, "--batches", 30, "in a block")

    flags = _add(words, "loader", "augmented training images a second against timm's loader")
    _add_images(flags)
    flags.add_argument("--data-dir", default="", help="with train/CLASS/IMAGE; without it images are made")
    _number(flags, "--images", 1024, "made like photographs of 500 x 375")

    flags = _add(words, "augmentation", "RandAugment on the whole image beside RandAugment on the crop")
    _add_images(flags)
    flags.add_argument("--data-dir", default="", help="with train/CLASS/IMAGE; without it images are made")
    _number(flags, "--images", 1024, "made like photographs of 500 x 375")
    _number(flags, "--plans", 5000, "drawn to count what is filled")

    flags = _add(words, "labels", "reading a label map against torch.load")
    _number(flags, "--maps", 2000, "made for this")

    flags = _add(words, "map_geometry", "labels beside their pixels, by how maps are read", in_pairs=False)
    _number(flags, "--images", 1000, "whose sizes are drawn")
    _number(flags, "--img-size", 224, "pixels")
    _number(flags, "--cells", 18, "a side of a map")
    flags.add_argument(
        "--map-geometry",
        default="centre-crop:576:576",
        metavar="GEOMETRY",
        help="what maps cover (%(default)s)",
    )

    flags = _add(words, "catalog", "start-up on many images, and the memory they hold in each rank")
    _number(flags, "--images", 1281167, "made for this, as links")
    _number(flags, "--classes", 1000, "class folders")

    flags = _add(words, "soak", "whether memory and open files grow", in_pairs=False)
    _add_images(flags)
    _add_data_dir(flags)
    flags.add_argument("--token-label-data", default="", metavar="DIR", help="label maps, if any")
    flags.add_argument("--minutes", type=float, default=10.0, metavar="N", help="(%(default)s)")


def _of_learning(words: Words) -> None:
    flags = _add(words, "learning", "accuracy after equal training, ours and timm's train.py", in_pairs=False)
    flags.add_argument("data_dir", metavar="DATA_DIR", help="with train/CLASS/IMAGE and val/CLASS/IMAGE")
    flags.add_argument("--against", choices=("timm",), default="timm", help="(%(default)s)")
    flags.add_argument("--timm", required=True, metavar="DIR", help="a checkout of timm, with train.py")
    usual = "packed label maps of the training images: ours also learns from these"
    flags.add_argument("--token-label-data", default="", metavar="DIR", help=usual)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    usual = "folder of the runs; one that is finished there is read, not repeated (%(default)s)"
    flags.add_argument("--output", default="runs/learning", metavar="DIR", help=usual)
    flags.add_argument("--model", default="volo_demo", help="a size of VOLO (%(default)s)")
    _number(flags, "--img-size", 64, "pixels")
    _number(flags, "--batch-size", 64, "images a step")
    _number(flags, "--epochs", 10, "the first of them warms up")
    flags.add_argument("--lr", type=float, default=2e-3, metavar="RATE", help="at its peak (%(default)s)")


def _add(
    words: Words,
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


def _add_network(flags: argparse.ArgumentParser, batch_size: int = 8) -> None:
    flags.add_argument("--model", default="volo_d1", help="(%(default)s)")
    _number(flags, "--img-size", 224, "pixels")
    _number(flags, "--batch-size", batch_size, "images a rank")


def _add_other_ways(flags: argparse.ArgumentParser) -> None:
    ways = ["stock", "ddp", "late"]
    usual = "other ways to measure in turns with ours; none: our efficiency alone"
    flags.add_argument("--against", nargs="*", choices=ways, default=ways, help=usual)
    flags.set_defaults(pairs=5)


def _add_data_dir(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--data-dir", default="data/demo", help="with train/CLASS/IMAGE (%(default)s)")


def _add_images(flags: argparse.ArgumentParser) -> None:
    _number(flags, "--img-size", 64, "side of the images given, pixels")
    _number(flags, "--batch-size", 32, "images")
    _number(flags, "--threads", 0, "data threads; 0: as many as cores")


def _number(flags: argparse.ArgumentParser, name: str, default: int, help: str) -> None:
    flags.add_argument(name, type=int, default=default, metavar="N", help=f"{help} (%(default)s)")
