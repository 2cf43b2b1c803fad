"""Finds the folder and the format of a split, and a digest of its state.

The state changes with the contents, but is computed without opening files: from the names and modification
times of the class folders, or the names, sizes and modification times of the shards and their indices.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from horovod_volo.core.errors import UserError

Split = Literal["train", "val"]
Format = Literal["folder", "tar", "tfrecord", "recordio"]

FOLDER_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation")}
CLASSES_FILE = "classes.txt"  # beside tar shards: one class name a line
NAMES_SHOWN = 8
_SHARD_NAMES: dict[Format, re.Pattern[str]] = {
    "tar": re.compile(r".*\.tar"),
    "tfrecord": re.compile(r".*\.tfrecord|.*-\d{5}-of-\d{5}"),
    "recordio": re.compile(r".*\.rec"),
}


@dataclass(frozen=True)
class SplitFolder:
    """One split on disk, before its images are listed."""

    root: Path
    format: Format
    parts: tuple[str, ...]  # class folders or shards, sorted
    state: str

    @property
    def key(self) -> str:
        """Return a short name that is unique to this folder."""
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]


def find_split(data_dir: str, split: Split) -> SplitFolder:
    """Find one split of `data_dir`; raise UserError if it has no images."""
    root = _split_root(data_dir, split)
    folders, files = _visible(root)
    found: dict[Format, list[str]] = {
        form: [name for name in files if pattern.fullmatch(name)] for form, pattern in _SHARD_NAMES.items()
    }
    if folders:
        found["folder"] = folders
    present = [form for form, parts in found.items() if parts]
    if not present:
        raise UserError(
            f"{root} has no class folders. Put each image under {root}/CLASS/, one folder for each class, "
            "or shards directly inside: *.tar, *.tfrecord or *.rec."
        )
    if len(present) > 1:
        examples = " and ".join(f"{found[form][0]} ({form})" for form in present)
        raise UserError(
            f"{root} holds images in several formats: {examples}. Leave one of them and move the others away."
        )
    form = present[0]
    parts = tuple(sorted(found[form]))
    beside = [] if form == "folder" else [name for name in files if name.endswith(".idx")]
    if form == "tar" and CLASSES_FILE in files:
        beside.append(CLASSES_FILE)
    return SplitFolder(root, form, parts, _state(root, form, [*parts, *sorted(beside)]))


def index_beside(shard: Path) -> Path:
    """Return the path of a shard's index, which need not exist."""
    known_ending = any(shard.name.endswith(ending) for ending in (".tar", ".tfrecord", ".rec"))
    return shard.with_suffix(".idx") if known_ending else shard.with_name(f"{shard.name}.idx")


def shortened(names: Sequence[str]) -> str:
    """Join names for a message; of many, only the first."""
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _split_root(data_dir: str, split: Split) -> Path:
    if not data_dir:
        raise UserError("no data folder is given. Name the folder that holds train/ and val/.")
    data = Path(data_dir)
    if not data.is_dir():
        raise UserError(f"there is no data folder {data}. Name the folder that holds train/ and val/.")
    names = FOLDER_NAMES[split]
    for name in names:
        if (data / name).is_dir():
            return (data / name).absolute()
    found, _ = _visible(data)
    raise UserError(
        f"{data} has no folder {' or '.join(names)}; "
        + (f"it has {shortened(sorted(found))}. " if found else "it has no folders at all. ")
        + f"Name the folder above it, or arrange the images as {data / names[0]}/CLASS/IMAGE."
    )


def _visible(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders and the files that are not hidden."""
    with os.scandir(folder) as entries:
        visible = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    return [name for name, is_dir in visible if is_dir], [name for name, is_dir in visible if not is_dir]


def _state(root: Path, form: Format, names: list[str]) -> str:
    digest = hashlib.sha256(json.dumps([str(root), form]).encode())
    for name in names:
        found = (root / name).stat()
        size = 0 if form == "folder" else found.st_size
        digest.update(json.dumps([name, size, found.st_mtime_ns]).encode())
    return digest.hexdigest()
