"""Damaged samples are replaced by a fixed rule, reported and limited; unusual images are read correctly."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coded_images as coded
import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from published_augment import timm_pixels

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.image_decoder import DecoderName
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import TrainLoader
from horovod_volo.data.reading import decode_rgb, read_image
from horovod_volo.token_labels.source import open_labels

IMAGES, SIDE, DAMAGED = 12, 32, 5
FILE = f"train/a/{DAMAGED:02d}.jpg"
STRIDE = 7  # 12 divided by the golden ratio, rounded; it has no common factor with 12
REPLACEMENT = (DAMAGED + STRIDE) % IMAGES
REPLACED = sorted([*(n for n in range(IMAGES) if n != DAMAGED), REPLACEMENT])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of images, each with a label map."""
    images = {f"train/a/{n:02d}.jpg": coded.smooth(60 + n, 90 - 2 * n, seed=n) for n in range(IMAGES)}
    folder = coded.write_images(tmp_path / "images", images)
    (folder / "maps" / "a").mkdir(parents=True)
    for name in images:
        torch.save(torch.zeros(2, 1, 3, 3), label_map_of(folder / name))
    return folder


def open_loader(folder: Path, **settings: object) -> TrainLoader:
    catalog = build_catalog(str(folder), "train", None)
    labels = open_labels(str(folder / "maps"), catalog, None)
    return coded.train_loader(catalog, Data(batch_size=4, **(coded.PLAIN | settings)), labels)  # type: ignore[arg-type]


def with_large_sides(jpeg: bytes) -> bytes:
    sides = jpeg.index(b"\xff\xc0") + 5  # after the start-of-frame marker, length and bits
    return jpeg[:sides] + b"\xff\xff\xff\xff" + jpeg[sides + 4 :]


def tiff_with_floats_as_offsets() -> bytes:
    content, offsets = coded.encoded(coded.smooth(60, 90, seed=0), "TIFF"), struct.pack("<HHI", 273, 4, 1)
    assert content.count(offsets) == 1  # tag, type and number of the strips' offsets
    return content.replace(offsets, struct.pack("<HHI", 273, 11, 1))


def label_map_of(file: Path) -> Path:
    return file.parents[2] / "maps" / "a" / file.with_suffix(".pt").name


def delete_label_map(file: Path, whole: bytes) -> None:
    file.write_bytes(whole)
    label_map_of(file).unlink()


def png_with_damaged_pixels() -> bytes:
    """Return an image whose header and end are intact, so that only the decoder finds the damage."""
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    png = coded.encoded(Image.fromarray(pixels), "PNG")
    return png[:200] + bytes(4800) + png[5000:]


UNKNOWN = "cannot be decoded: it is not an image of a known format"
TOO_LARGE = "has more than 100 million pixels; resize it to use it"
# What takes the place of an image, whose path and content are given, and what is reported.
DAMAGES: dict[str, tuple[Callable[[Path, bytes], object], str]] = {
    "deleted": (lambda file, _: None, "has gone since it was listed"),
    "a folder": (lambda file, _: file.mkdir(), "cannot be read: Is a directory"),
    "a link to itself": (lambda file, _: file.symlink_to(file), "cannot be read: Too many levels of"),
    "empty": (lambda file, _: file.touch(), "is empty"),
    "no image": (lambda file, _: file.write_bytes(b"these are words, and no image at all"), UNKNOWN),
    "truncated": (lambda file, jpeg: file.write_bytes(jpeg[: len(jpeg) // 2]), "cannot be decoded: "),
    "header only": (lambda file, jpeg: file.write_bytes(jpeg[:30]), "cannot be decoded: "),
    "large sides": (lambda file, jpeg: file.write_bytes(with_large_sides(jpeg)), TOO_LARGE),
    # It has 20 kB; decoded, it would need 1.6 GB.
    "large": (lambda file, _: Image.new("1", (13_000, 13_000)).save(file, "PNG"), TOO_LARGE),
    "TIFF": (lambda file, _: file.write_bytes(tiff_with_floats_as_offsets()), "cannot be decoded: "),
    "PNG": (lambda file, _: file.write_bytes(png_with_damaged_pixels()), "cannot be decoded"),
    "PostScript": (lambda file, _: coded.smooth(60, 90, seed=0).save(file, "EPS"), UNKNOWN),
    "without a label map": (delete_label_map, "there is no label map"),
}


@pytest.mark.parametrize("decoder", ["dali", "pillow"])
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_damaged_sample_is_replaced_by_a_fixed_other_one(folder: Path, how: str, decoder: str) -> None:
    loader, file = open_loader(folder, image_decoder=decoder), folder / FILE
    change, reason = DAMAGES[how]
    whole = file.read_bytes()
    file.unlink()
    change(file, whole)
    for _ in range(2):  # by the same image in each pass over the data
        assert sorted(int(index) for batch in loader.batches(0, 0) for index in batch.indices) == REPLACED
    assert loader.bad_samples.skipped == 2
    (reported,) = loader.bad_samples.new_messages()  # reported once
    assert reported.startswith((f"{file} {reason}", f"{reason} {label_map_of(file)}"))
    assert loader.bad_samples.new_messages() == []
    loader.close()


def test_damaged_images_are_an_error_with_bad_samples_fail_and_beyond_the_limit(folder: Path) -> None:
    for number in (1, 3, 5):
        (folder / f"train/a/{number:02d}.jpg").write_bytes(b"no image")
    for settings, message in (
        ({"bad_samples": "fail"}, r"0[135]\.jpg.*--bad-samples skip"),
        ({"bad_samples_limit": 2}, r"3 samples are damaged.*--bad-samples-limit"),
    ):
        loader = open_loader(folder, **settings)
        with pytest.raises(UserError, match=message):
            list(loader.batches(0, 0))
        loader.close()


def test_the_images_of_a_lost_shard_have_different_replacements() -> None:
    tracker = BadSampleTracker("skip", limit=1000)

    def read(index: int) -> int:
        if 300 <= index < 400:
            raise BadSampleError(f"{index} is lost")
        return index

    found = [tracker.read_or_replace(index, 1000, read)[0] for index in range(300, 400)]
    assert len(set(found)) == 100
    assert tracker.skipped == 100
    for images in range(1, 40):  # with any number of images, the only readable one is found
        last = BadSampleTracker("skip", limit=1000)

        def only_the_last(index: int, end: int = images - 1) -> int:
            if index != end:
                raise BadSampleError("lost")
            return index

        assert last.read_or_replace(0, images, only_the_last)[0] == images - 1


def test_no_program_is_started_to_read_an_image(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript, whatever the file is called."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("started"))
    coded.smooth(60, 90, seed=0).save(folder / FILE, "EPS")
    with pytest.raises(BadSampleError, match=r"05\.jpg cannot be decoded: it is not an image of a known"):
        decode_rgb(build_catalog(str(folder), "train", None), DAMAGED)


def unusual_images() -> dict[str, tuple[Image.Image, dict[str, Any]]]:
    """Return images and options of saving them."""
    colours, exif = coded.smooth(70, 50, seed=3), Image.Exif()
    alpha = colours.copy()
    alpha.putalpha(Image.linear_gradient("L").resize((70, 50)))
    exif[0x0112] = 6  # turned; timm ignores it
    return {
        "cmyk.jpg": (colours.convert("CMYK"), {}),
        "gray.jpg": (colours.convert("L"), {}),
        "gray.png": (colours.convert("L"), {}),
        "alpha.png": (alpha, {}),
        "palette.png": (colours.convert("P"), {}),
        "gray_alpha.png": (alpha.convert("LA"), {}),
        "bits.png": (colours.convert("1"), {}),
        "picture.webp": (colours, {"lossless": True}),
        "picture.bmp": (colours, {}),
        "picture.tif": (colours, {}),
        "wrong_ending.jpg": (colours, {"format": "PNG"}),
        "one_pixel.png": (colours.resize((1, 1)), {}),
        "turned.jpg": (colours, {"exif": exif}),
        "turned.tif": (colours, {"exif": exif}),
    }


@pytest.mark.parametrize("name", unusual_images())
def test_unusual_images_are_read_as_by_pillow(tmp_path: Path, name: str) -> None:
    """Evaluation pixels equal those of timm, which resizes after convert("RGB")."""
    picture, options = unusual_images()[name]
    catalog = build_catalog(
        str(coded.write_images(tmp_path, {f"val/a/{name}": picture}, **options)), "val", None
    )
    with Image.open(catalog.location(0)) as image:
        size = (image.height, image.width)
    assert read_image(catalog, 0)[1] == size
    assert name != "turned.jpg" or size == (50, 70)
    (pixels,) = coded.unnormalised(coded.evaluated_images(catalog, Data(batch_size=1)))
    theirs, _ = timm_pixels(catalog.location(0), SIDE)
    assert np.abs(pixels - theirs).mean() < 1.5


RAMP = np.arange(70 * 50, dtype=np.uint16).reshape(50, 70) * 18


def deep_images() -> dict[str, bytes]:
    """Return the ramp in files of more than 8 bits a pixel."""
    files = {"sixteen.pgm": b"P5\n70 50\n65535\n" + RAMP.astype(">u2").tobytes()}
    for name, pixels in {
        "sixteen.png": RAMP,
        "sixteen.tif": RAMP,
        "big endian.tif": RAMP.astype(">u2"),
        "integers.tif": RAMP.astype(np.int32),
        "floats.tif": (RAMP / 65535).astype(np.float32),
    }.items():
        files[name] = coded.encoded(Image.fromarray(pixels), name[-3:].replace("tif", "tiff"))
    pairs = (RAMP >> 4).reshape(-1, 2).astype(np.uint32)
    packed = (pairs[:, :1] << 12 | pairs[:, 1:]).astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:]
    sixteen = bytearray(files["sixteen.tif"])
    tags = {258: 12, 279: packed.size}  # bits a pixel, and bytes of the one strip
    for tag, value in tags.items():
        place = max(sixteen.find(struct.pack("<HHI", tag, kind, 1)) for kind in (3, 4))
        struct.pack_into("<HHII", sixteen, place, tag, 4, 1, value)
    start = bytes(sixteen).index(RAMP.tobytes())
    sixteen[start : start + RAMP.nbytes] = packed.tobytes()
    return files | {"twelve.tif": bytes(sixteen)}


@pytest.mark.parametrize("decoder", ["dali", "pillow"])
@pytest.mark.parametrize("name", deep_images())
def test_gray_images_of_more_than_8_bits_are_scaled_or_refused(tmp_path, name, decoder):
    file = (tmp_path / "val" / "a" / name).with_suffix(".png")
    file.parent.mkdir(parents=True)
    file.write_bytes(deep_images()[name])
    settings = Data(batch_size=1, image_decoder=decoder, bad_samples="skip")
    catalog = build_catalog(str(tmp_path), "val", None)
    loader = coded.eval_loader(catalog, settings, image_size=50)
    (batch,) = loader
    loader.close()
    if name in ("integers.tif", "floats.tif"):
        (message,) = loader.bad_samples.new_messages()
        assert "convert the image to 8 or 16 bits" in message
        return
    pixels = coded.unnormalised(batch.images)[0]
    levels = RAMP / 65535 if name != "twelve.tif" else (RAMP >> 4) / 4095
    expected = np.rint(255 * levels)
    assert np.abs(pixels - expected[:, 10:60]).max() < 1e-3
    assert np.abs(decode_rgb(catalog, 0) - expected[..., None]).max() == 0


@pytest.mark.parametrize("decoder", ["dali", "pillow"])
def test_an_image_of_too_many_pixels_after_resizing_is_left_out(tmp_path: Path, decoder: DecoderName) -> None:
    """With 40 rows this line has 105 million pixels; in a large evaluation it would need 15 GB."""
    images = {"val/a/line.png": Image.new("L", (65_500, 1)), "val/a/plain.png": coded.smooth(60, 90, seed=1)}
    catalog = build_catalog(str(coded.write_images(tmp_path, images)), "val", None)
    settings = Data(batch_size=2, image_decoder=decoder)
    message = (
        f"{tmp_path}/val/a/line.png has more than 100 million pixels when it is resized to 2620000 x 40; "
        "crop it to use it"
    )
    loader = coded.eval_loader(catalog, settings, image_size=40)
    (batch,) = loader
    loader.close()
    assert batch.classes.tolist() == [NO_CLASS, 0]
    assert loader.bad_samples.new_messages() == [message]
