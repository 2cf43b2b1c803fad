"""Recognises image files by name or by their first bytes, without decoding."""

from __future__ import annotations

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")

_ENDING_OF_START = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG\r\n\x1a\n": ".png",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    b"GIF8": ".gif",  # decoders accept it under any name
}
START_BYTES = 12  # enough for `ending_of`


def ending_of(start: bytes) -> str:
    """Return the usual file name extension for an image's first bytes; empty if they are not an image."""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return ".webp"
    return next((ending for bytes_, ending in _ENDING_OF_START.items() if start.startswith(bytes_)), "")
