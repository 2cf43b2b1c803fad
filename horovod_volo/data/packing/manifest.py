"""The manifest of a packed split, and its verification."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horovod_volo.core.atomic_file import atomic_write, file_sha256, json_sha256
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import list_images
from horovod_volo.data.images.split_folder import CLASSES_FILE, PUBLISHED_CATALOG, Split, find_split
from horovod_volo.data.images.tar_shards import index_beside

MANIFEST = "manifest.json"
_CHECKSUM = "checksum"  # its last entry; earlier versions wrote none


@dataclass(frozen=True)
class PackedShard:
    """A finished shard; an entry of the manifest."""

    file: str
    images: int
    bytes: int
    sha256: str
    index_sha256: str  # empty: the shard has no index
    left_out: tuple[str, ...]  # one message for each image that cannot be decoded


def parse_shard(record: dict[str, Any]) -> PackedShard:
    """Parse a shard's JSON record."""
    return PackedShard(**{**record, "left_out": tuple(record["left_out"])})


@dataclass(frozen=True)
class Manifest:
    """A packed split; the fields of manifest.json."""

    images: int
    bytes: int
    classes: int
    classes_sha256: str
    asked: dict[str, Any]  # digest of the source catalog and pack options
    shards: tuple[PackedShard, ...]

    def write(self, folder: Path) -> None:
        """Write the manifest into the folder of the shards."""
        fields = asdict(self)
        write_json(folder / MANIFEST, fields | {_CHECKSUM: json_sha256(fields)})

    @property
    def left_out(self) -> list[str]:
        """Return one message for each image that was left out."""
        return [image for shard in self.shards for image in shard.left_out]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a packed split; raise UserError if there is none."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        checksum = content.pop(_CHECKSUM, None)
        if checksum is not None and checksum != json_sha256(content):
            raise ValueError("it does not match its checksum")
        return Manifest(**{**content, "shards": tuple(map(parse_shard, content["shards"]))})
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {MANIFEST}: it is not a packed split. Name another folder."
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{folder / MANIFEST} is damaged: {error}. Copy it again, or remove {folder} and pack again."
        ) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def check_split(folder: Path, *, workers: int, progress: Callable[[int, int], None]) -> list[str]:
    """Compare the files of a packed split with the checksums of its manifest; return the differences."""
    manifest = read_manifest(folder)
    expected = {folder / CLASSES_FILE: manifest.classes_sha256}
    for shard in manifest.shards:
        expected[folder / shard.file] = shard.sha256
        if shard.index_sha256:
            expected[index_beside(folder / shard.file)] = shard.index_sha256
    problems = [
        f"{path} is not in {MANIFEST}" for path in sorted(folder.glob("*.tar")) if path not in expected
    ]
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda path: file_sha256(path) if path.exists() else "", expected)
        for done, ((path, sha256), actual) in enumerate(zip(expected.items(), found, strict=True), 1):
            if actual != sha256:
                problems.append(
                    f"{path} is damaged: its checksum differs" if actual else f"{path} is missing"
                )
            progress(done, len(expected))
    return problems


def publish_catalog(data_dir: str, split: Split) -> int:
    """Write the list of a split's images beside its shards, for a server; return the number of shards.

    It is the same for the same shards, wherever they are.
    """
    images = find_split(data_dir, split)
    if images.format == "folder":
        raise UserError(
            f"{images.root} holds no shards, and only shards are read from a server. Pack it first."
        )
    sizes = [(images.root / shard).stat().st_size for shard in images.parts]
    with atomic_write(images.root / PUBLISHED_CATALOG) as file:
        list_images(images, file.fileno(), sizes=sizes)
    return len(sizes)
