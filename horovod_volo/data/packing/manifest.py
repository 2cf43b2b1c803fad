"""What a packed split says about itself, and whether it is still so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.split_folder import CLASSES_FILE, index_beside

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PackedShard:
    """A finished shard."""

    file: str
    images: int
    bytes: int
    sha256: str
    index_sha256: str  # empty: it has no index
    left_out: tuple[str, ...]  # images that cannot be decoded, and why


def shard_of(facts: dict[str, Any]) -> PackedShard:
    """Return the shard that was written as JSON."""
    return PackedShard(**{**facts, "left_out": tuple(facts["left_out"])})


@dataclass(frozen=True)
class Manifest:
    """A packed split."""

    images: int
    bytes: int
    classes: int
    classes_sha256: str
    asked: dict[str, Any]  # what it was made of, and how
    shards: tuple[PackedShard, ...]

    def write(self, folder: Path) -> None:
        """Write it beside the shards."""
        write_json(folder / MANIFEST, asdict(self))

    @property
    def left_out(self) -> list[str]:
        """Return the images that are not in it, and why."""
        return [image for shard in self.shards for image in shard.left_out]


def read_manifest(folder: Path) -> Manifest:
    """Read what lies beside the shards; raise UserError where there is nothing of the kind."""
    try:
        facts = json.loads((folder / MANIFEST).read_bytes())
        return Manifest(**{**facts, "shards": tuple(map(shard_of, facts["shards"]))})
    except FileNotFoundError:
        raise UserError(f"{folder} has no {MANIFEST}: it is no packed split. Name another folder.") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder / MANIFEST} is damaged: {error}. Copy it again, or remove {folder} and pack again."
        ) from error


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write facts to a file that is whole or absent."""
    with atomic_write(path) as file:
        file.write((json.dumps(facts, indent=1) + "\n").encode())


def check_split(folder: Path, *, workers: int, progress: Callable[[int, int], None]) -> list[str]:
    """Read a packed split again; return what is not as its manifest says."""
    manifest = read_manifest(folder)
    wanted = {folder / CLASSES_FILE: manifest.classes_sha256}
    for shard in manifest.shards:
        wanted[folder / shard.file] = shard.sha256
        if shard.index_sha256:
            wanted[index_beside(folder / shard.file)] = shard.index_sha256
    problems = [f"{path} is not in {MANIFEST}" for path in sorted(folder.glob("*.tar")) if path not in wanted]
    with ThreadPoolExecutor(workers) as pool:
        found = zip(wanted.items(), pool.map(_sha256, wanted), strict=True)
        for done, ((path, sha256), now) in enumerate(found, 1):
            if now != sha256:
                problems.append(f"{path} is missing" if not now else f"{path} is damaged: its sum is another")
            progress(done, len(wanted))
    return problems


def _sha256(path: Path) -> str:
    """Return a file's sum; empty if it is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
