"""Finds the folder and the format of a split, and a digest of its state.

The state changes with the contents, but is computed without opening files: from the names and modification
times of the class folders, or the names, sizes and modification times of the shards and their indices.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from horovod_volo.core.errors import UserError
from horovod_volo.data.reading import IMAGE_ENDINGS

Split = Literal["train", "val"]
Format = Literal["folder", "tar", "tfrecord", "recordio"]

FOLDER_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "validation", "valid", "test"),
}
CLASSES_FILE = "classes.txt"  # beside tar shards: one class name a line
PUBLISHED_CATALOG = "images.catalog"  # beside shards: the list of their images, for reading from a server
NAMES_SHOWN = 8
_EDITION = 2  # increase when other images of a folder are listed: lists of earlier versions are not used
_SHARD_NAMES: dict[Format, re.Pattern[str]] = {
    "tar": re.compile(r".*\.tar"),
    "tfrecord": re.compile(r".*\.tfrecord|.*-\d{5}-of-\d{5}"),
    "recordio": re.compile(r".*\.rec"),
}


@dataclass(frozen=True)
class HeldOut:
    folder: str = ""  # its name in the data folder; empty: the first of FOLDER_NAMES that there is
    share: float = 0.0  # of each class, where there is no such folder
    seed: int = 0


@dataclass(frozen=True)
class Part:
    """The images that are held out from each class of a folder, or those that are left."""

    share: float
    seed: int
    is_held_out: bool

    def of(self, class_name: str, files: list[str]) -> list[str]:
        """Return those of a class's files, in their order. The files of the lowest hashes are held out."""
        if len(files) < 2:
            raise UserError(
                f"class {class_name} has one image, and one must be held out. Add an image, or remove the "
                "class."
            )
        count = min(len(files) - 1, max(1, round(self.share * len(files))))
        drawn = set(sorted(files, key=lambda name: _sha256(f"{self.seed}/{class_name}/{name}"))[:count])
        return [name for name in files if (name in drawn) == self.is_held_out]


def _sha256(text: str) -> bytes:
    return hashlib.sha256(os.fsencode(text)).digest()


@dataclass(frozen=True)
class SplitFolder:
    """One split on disk, before its images are listed."""

    root: Path
    format: Format
    parts: tuple[str, ...]  # class folders or shards, sorted
    state: str
    part: Part | None = None  # None: all images

    @property
    def key(self) -> str:
        """Return a short name that is unique to these images."""
        part = f" {self.part}" if self.part else ""
        return _sha256(f"{self.root}{part}").hex()[:12]


def find_split(
    data_dir: str, split: Split, held_out: HeldOut | None = None, *, records: Format | None = None
) -> SplitFolder:
    """Find one split of `data_dir`; raise UserError if it has no images, or shards to convert first.

    With `records`, a split that holds shards of this format, to be converted.
    """
    root, part = _find_root(data_dir, split, held_out or HeldOut())
    folders, files, lost = visible(root)
    check_links(root, lost, len(folders) + len(files))
    found = _parts(folders, files)
    present = [form for form, parts in found.items() if parts]
    if records and records not in present:
        raise UserError(f"{root} holds no {records} shards. Mend --from, or name another folder.")
    if not present:
        raise UserError(
            f"{root} has no class folders. Put each image under {root}/CLASS/, one folder for each class, "
            "or tar shards directly inside."
        )
    if len(present) > 1:
        examples = " and ".join(f"{found[form][0]} ({form})" for form in present)
        raise UserError(
            f"{root} holds images in several formats: {examples}. Leave one of them and move the others away."
        )
    form = present[0]
    if form not in ("folder", "tar") and not records:
        raise UserError(
            f"{root} holds {form} shards, such as {min(found[form])}, which are not read directly. Convert "
            f"them once: horovod-volo pack --from {form} {data_dir} OUT_DIR, and use OUT_DIR."
        )
    if part and form != "folder":
        raise UserError(
            f"{root} holds shards, from which no images can be held out. Put others into "
            f"{root.parent / 'val'}."
        )
    parts = tuple(sorted(found[form]))
    beside = [name for name in files if form == "tar" and (name.endswith(".idx") or name == CLASSES_FILE)]
    return SplitFolder(root, form, parts, _state(root, form, [*parts, *sorted(beside)]), part)


def shortened(names: Sequence[str]) -> str:
    """Join names for a message; of many, only the first."""
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _find_root(data_dir: str, split: Split, held_out: HeldOut) -> tuple[Path, Part | None]:
    """Return the folder of a split, and the part of its images that the split is."""
    if not data_dir:
        raise UserError("no data folder is given. Name the folder that holds train/ and val/.")
    data = Path(data_dir)
    if not data.is_dir():
        raise UserError(f"there is no data folder {data}. Name the folder that holds train/ and val/.")
    beside = _held_out_folder(data, held_out.folder)
    if split == "val" and beside:
        return beside, None
    train = (data / FOLDER_NAMES["train"][0]).absolute()
    if not train.is_dir() and not beside and _holds_classes(data):
        train = data.absolute()
    if train.is_dir() and (split == "train" or held_out.share):
        is_part = not beside and held_out.share
        return train, Part(held_out.share, held_out.seed, split == "val") if is_part else None
    raise UserError(_what_is_missing(data, split))


def _what_is_missing(data: Path, split: Split) -> str:
    """Return what was found in a data folder instead of a split, and what to do."""
    folders, files, _ = map(sorted, visible(data))
    wanted = FOLDER_NAMES[split][0]
    images = [name for name in files if is_image(name)]
    if images and not folders:
        return (
            f"{data} has {len(images):,} images ({shortened(images[:2])}, ...) and no folders. Put each "
            f"image into a folder named after its class: {data}/CLASS/IMAGE."
        )
    inside = {name: visible(data / name) for name in folders}
    with_images = [name for name in folders if any(map(is_image, inside[name][1]))]
    if len(with_images) == 1 and len(folders) == 1:
        return (
            f"{data} has images of one class only, {folders[0]}. Add folders of other classes beside it, "
            f"or, if {folders[0]} is not a class, name the folder that holds the classes."
        )
    nested = [name for name in folders if inside[name][0] and name not in with_images]
    split_names = {name for names in FOLDER_NAMES.values() for name in names}
    if len(nested) > 1 and not split_names & set(folders):
        example = f"{nested[0]}/{min(inside[nested[0]][0])}"
        return (
            f"the folders in {data} ({shortened(folders)}) hold folders, such as {example}, instead of "
            f"images. Classes are one level deep: move the images up to {data}/CLASS/IMAGE, or name the "
            "folder that holds the classes."
        )
    found = f"it has {shortened(folders)}" if folders else "it has no folders at all"
    return (
        f"{data} has no folder {' or '.join(FOLDER_NAMES[split])}; {found}. Name the folder above it, or "
        f"arrange the images as {data}/{wanted}/CLASS/IMAGE."
    )


def _held_out_folder(data: Path, chosen: str) -> Path | None:
    folders, files, lost = visible(data)
    if chosen and not (data / chosen).is_dir():
        found = shortened(sorted(folders))
        raise UserError(f"{data} has no folder {chosen}; it has {found}. Mend --val-split.")
    for name in [chosen] if chosen else FOLDER_NAMES["val"]:
        check_links(data, [name] if name in lost else [], len(folders) + len(files))
        folder = (data / name).absolute()
        # A folder `test` often holds images without classes.
        if folder.is_dir() and (chosen or name != "test" or any(_parts(*visible(folder)[:2]).values())):
            return folder
    return None


def _holds_classes(folder: Path) -> bool:
    """Return whether two folders or more have images directly inside."""
    return sum(any(map(is_image, visible(folder / name)[1])) for name in visible(folder)[0]) > 1


def _parts(folders: list[str], files: list[str]) -> dict[Format, list[str]]:
    """Return what the split in a folder would consist of, by format."""
    shards = {form: list(filter(pattern.fullmatch, files)) for form, pattern in _SHARD_NAMES.items()}
    return {**shards, "folder": folders}


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS)


def visible(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the names that are not hidden: of folders, of files, and of links to nothing among these."""
    folders, files, lost = list[str](), list[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            # Neither pipes and sockets, nor the "._name.jpg" that macOS writes beside name.jpg.
            if not entry.name.startswith(".") and (entry.is_dir() or entry.is_file() or entry.is_symlink()):
                (folders if entry.is_dir() else files).append(entry.name)
                if not (entry.is_dir() or entry.is_file()):
                    lost.append(entry.name)
    return folders, files, lost


def paths_below(folder: Path, unlisted: list[str] | None = None) -> dict[str, bool]:
    """Return all paths below a folder, those in linked folders too, and whether something is there.

    Links that lead up are not followed. What cannot be listed is an error, or noted in `unlisted`.
    """
    found: dict[str, bool] = {}
    pending, root = [""], Path(os.path.realpath(folder))
    while pending:
        inside = pending.pop()
        here = root / inside
        try:
            if inside:
                found[inside[:-1]] = here.is_dir() or here.is_file()
            above = here.parents if here.is_symlink() else ()
            if not inside or (here.is_dir() and not any(map(here.samefile, above))):
                with os.scandir(here) as entries:
                    for entry in entries:
                        if entry.is_symlink() or entry.is_dir():
                            pending.append(f"{inside}{entry.name}/")
                        elif entry.is_file():  # no pipe or socket
                            found[f"{inside}{entry.name}"] = True
        except OSError as error:
            problem = f"{error.filename} cannot be listed: {error.strerror}"
            if unlisted is None or not inside:
                raise UserError(f"{problem}. Correct this.") from None
            unlisted.append(problem)
    return found


def check_links(folder: Path, lost: Sequence[str], count: int) -> None:
    """Raise UserError if some entries of a folder, of `count` in all, are links to nothing."""
    if lost:
        raise UserError(
            f"{len(lost)} of {count} entries of {folder} are links to nothing, the first: {min(lost)}. Fetch "
            "(git-annex: `git annex get`) or mount what they name, or remove them."
        )


def _state(root: Path, form: Format, names: list[str]) -> str:
    digest = hashlib.sha256(json.dumps([_EDITION, str(root), form]).encode())
    for name in names:
        found = (root / name).stat()
        size = 0 if form == "folder" else found.st_size
        digest.update(json.dumps([name, size, found.st_mtime_ns]).encode())
    return digest.hexdigest()
