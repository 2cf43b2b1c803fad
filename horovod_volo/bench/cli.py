"""Flags of a benchmark, read from the signature of its `measure`: name, type, default, and an annotated help.

`batch_size: Annotated[int, Flag("images per rank")] = 8` declares the flag `--batch-size N` with the help
"images per rank (default: 8)". A Literal gives choices, a sequence takes several values, a bool is a switch;
a parameter without a default is positional. Parameters that several benchmarks share are declared here.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from horovod_volo.config.arguments import whole_number


@dataclass(frozen=True)
class Flag:
    """What the command line needs to know about a parameter beyond its name, type and default."""

    help: str
    read: Callable[[str], object] | None = None  # instead of the type, where not every value is allowed
    may_be_empty: bool = False  # of a sequence


ModelName = Annotated[str, Flag("VOLO size, or any model that the trainer builds")]
ImgSize = Annotated[int, Flag("side of the square input images, in pixels")]
BatchSize = Annotated[int, Flag("images per rank and step")]
Precision = Annotated[Literal["fp32", "tf32", "bf16", "fp16"], Flag("arithmetic of forward and backward")]
Kernels = Annotated[Literal["auto", "plain"], Flag("on a GPU: Triton kernels, or PyTorch's own operators")]
Compile = Annotated[bool, Flag("compile the network's blocks")]
DropPath = Annotated[float, Flag("largest drop path rate (stochastic depth)")]
Pairs = Annotated[
    int, Flag("timed blocks of each side", read=whole_number(2, because=": one pair has no spread"))
]


def add_flags(parser: argparse.ArgumentParser, function: Callable[..., object]) -> None:
    """Add a flag for each parameter of a function."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, flag = get_args(hints[name])
        options: dict[str, Any] = {"help": flag.help}
        has_default = parameter.default is not parameter.empty
        if has_default:
            options = {"help": flag.help + _shown_default(parameter.default), "default": parameter.default}
        if get_origin(kind) is Sequence:
            options["nargs"] = "*" if flag.may_be_empty else "+"
            (kind,) = get_args(kind)
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options |= {"type": flag.read or kind, "metavar": "N" if kind is int else name.upper()}
        parser.add_argument(f"--{name.replace('_', '-')}" if has_default else name, **options)


def _shown_default(default: object) -> str:
    if default is False or default == "":
        return ""
    return f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
