"""Write small tar shards without the package's code."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from PIL import Image


def picture(number: int, kind: str = "JPEG") -> bytes:
    """Return an encoded image that differs from those of other numbers."""
    data = io.BytesIO()
    Image.new("RGB", (16 + number, 12), (number * 40 % 256, number * 90 % 256, 99)).save(data, kind)
    return data.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_tar_index(path: Path) -> None:
    """Write an index as DALI's tool does: consecutive members with the same key form a sample."""
    samples: dict[str, list[str]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, ending = member.name.partition(".")
            samples.setdefault(key, []).append(f"{ending} {member.offset_data} {member.size} {member.name}")
    lines = [f"v1.2 {len(samples)}", *(" ".join(members) for members in samples.values())]
    path.with_suffix(".idx").write_text("\n".join(lines) + "\n")
