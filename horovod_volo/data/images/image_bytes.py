"""What tells that a file or some bytes are an image, without decoding them."""

from __future__ import annotations

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")

_ENDING_OF_START = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG\r\n\x1a\n": ".png",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    b"GIF8": ".gif",  # decoders take it under whatever name it lies
}
START_BYTES = 12  # enough to tell


def ending_of(start: bytes) -> str:
    """Return the usual name ending of image bytes by how they start; empty: they are no image."""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return ".webp"
    return next((ending for bytes_, ending in _ENDING_OF_START.items() if start.startswith(bytes_)), "")
