"""The size that is read from a JPEG's segments is the one that Pillow reads, also from damaged files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from horovod_volo.data.reading import UNDECODABLE, jpeg_size, open_image
from tests.unit.coded_images import smooth

PICTURE = smooth(60, 40, seed=1)
EXIF = Image.Exif()
EXIF[0x0112] = 6  # turned; neither decoder obeys it
ORDINARY: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "baseline": (PICTURE, {}),
    "progressive": (PICTURE, {"progressive": True}),
    "gray": (PICTURE.convert("L"), {}),
    "with metadata": (
        PICTURE,
        {"exif": EXIF, "icc_profile": b"profile", "comment": b"words", "dpi": (72, 72)},
    ),
    "with restarts": (PICTURE, {"restart_marker_rows": 1, "subsampling": 0}),
}
OTHERS = {"CMYK": (PICTURE.convert("CMYK"), {}), "several": (PICTURE, {"save_all": True, "format": "MPO"})}


def encode(image: Image.Image, options: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    more = {"append_images": [image]} if "save_all" in options else {}
    image.save(file, **{"format": "JPEG", **options, **more})
    return file.getvalue()


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_files_need_no_pillow(name: str) -> None:
    assert jpeg_size(memoryview(encode(*ORDINARY[name]))) == (40, 60)


@pytest.mark.parametrize("name", OTHERS)
def test_pillow_is_asked_about_others(name: str) -> None:
    encoded = encode(*OTHERS[name])
    assert open_image(encoded).size == (60, 40)
    assert jpeg_size(memoryview(encoded)) is None


@pytest.mark.parametrize("name", [*ORDINARY, *OTHERS])
def test_damaged_headers_give_no_other_size_than_pillow_reads(name: str) -> None:
    encoded, draws = encode(*{**ORDINARY, **OTHERS}[name]), np.random.default_rng(5)
    header = encoded.index(b"\xff\xda")  # where the pixels begin
    both = 0
    for _ in range(1500):
        damaged = bytearray(encoded)
        damaged[draws.integers(header)] = draws.integers(256)
        size = jpeg_size(memoryview(damaged))
        if size is None:
            continue
        try:
            with open_image(bytes(damaged)) as image:
                assert (size, image.format) == ((image.height, image.width), "JPEG")
                assert image.mode in ("RGB", "L")
        except UNDECODABLE:
            continue
        both += 1
    assert both > 500 or name in OTHERS
