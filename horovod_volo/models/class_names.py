"""The names of a network's classes, in the order of its logits.

They are in the header of the safetensors files of checkpoints and exports, so they travel with the weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from horovod_volo.models.timm_api import imagenet_classes
from horovod_volo.models.weights import TIMM, weights_file

_KEY = "classes"


def header_of(names: Sequence[str]) -> dict[str, str]:
    """Return the header of a safetensors file of a network with these classes."""
    return {"format": "pt"} | ({_KEY: json.dumps(list(names))} if names else {})


def read_class_names(source: str) -> tuple[str, ...]:
    """Return the names that are with the weights at `source`; none, if they are of an earlier version."""
    if source.startswith(TIMM):
        return imagenet_classes(source.removeprefix(TIMM))
    try:
        names = json.loads(read_header(source).get(_KEY, "[]"))
    except ValueError:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def read_header(source: str) -> dict[str, str]:
    """Return the header of the safetensors file at `source`; nothing, if there is no such file."""
    if source.startswith(TIMM):
        return {}
    file = weights_file(Path(source))
    if file.suffix != ".safetensors":
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError):
        return {}  # reading the weights explains what is wrong
