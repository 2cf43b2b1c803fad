"""Damaged samples are replaced by a fixed rule, reported and limited; unusual images are read correctly."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from coded_images import (
    PLAIN,
    eval_loader,
    evaluated_images,
    smooth,
    train_loader,
    unnormalised,
    write_images,
)
from PIL import EpsImagePlugin, Image

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
    images = {f"train/a/{n:02d}.jpg": smooth(60 + n, 90 - 2 * n, seed=n) for n in range(IMAGES)}
    return write_images(tmp_path / "images", images)


def open_loader(folder: Path, maps: Path | None = None, **settings: object) -> TrainLoader:
    catalog = build_catalog(str(folder), "train", None)
    labels = None if maps is None else open_labels(str(maps), catalog, None)
    return train_loader(catalog, Data(batch_size=4, **(PLAIN | settings)), labels)  # type: ignore[arg-type]


def indices_of(loader: TrainLoader) -> list[int]:
    return sorted(int(index) for batch in loader.batches(0, 0) for index in batch.indices)


def damage(file: Path, how: str) -> None:
    whole = file.read_bytes()
    match how:
        case "deleted":
            file.unlink()
        case "a folder":
            file.unlink()
            file.mkdir()
        case "empty":
            file.write_bytes(b"")
        case "no image":
            file.write_bytes(b"these are words, and no image at all")
        case "truncated":
            file.write_bytes(whole[: len(whole) // 2])
        case "header only":
            file.write_bytes(whole[:30])
        case "too large":
            header = bytearray(whole)
            offset = header.index(b"\xff\xc0")  # start-of-frame marker, then length, bits, height and width
            header[offset + 5 : offset + 9] = b"\xff\xff\xff\xff"
            file.write_bytes(bytes(header))
        case "a damaged TIFF":
            content = io.BytesIO()
            smooth(60, 90, seed=0).save(content, "TIFF")
            offsets = struct.pack("<HHI", 273, 4, 1)  # tag, type and number of the strips' offsets
            assert content.getvalue().count(offsets) == 1
            file.write_bytes(content.getvalue().replace(offsets, struct.pack("<HHI", 273, 11, 1)))  # floats
        case "PostScript":
            smooth(60, 90, seed=0).save(file, "EPS")


KINDS = ["deleted", "a folder", "empty", "no image", "truncated", "header only", "too large"]
KINDS += ["a damaged TIFF", "PostScript"]


@pytest.mark.parametrize("how", KINDS)
def test_a_damaged_image_is_replaced_by_a_fixed_other_one(folder: Path, how: str) -> None:
    loader = open_loader(folder)
    damage(folder / FILE, how)
    for _ in range(2):  # by the same image in each pass over the data
        assert indices_of(loader) == REPLACED
    assert loader.bad_samples.skipped == 2
    (reported,) = loader.bad_samples.new_messages()  # reported once
    assert FILE in reported
    assert loader.bad_samples.new_messages() == []
    loader.close()


def test_damaged_images_are_an_error_with_bad_samples_fail_and_beyond_the_limit(folder: Path) -> None:
    for number in (1, 3, 5):
        damage(folder / f"train/a/{number:02d}.jpg", "truncated")
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
    damage(folder / FILE, "PostScript")
    with pytest.raises(BadSampleError, match=r"05\.jpg cannot be decoded: it is not an image of a known"):
        decode_rgb(build_catalog(str(folder), "train", None), DAMAGED)


@pytest.mark.parametrize("decoder", ["dali", "pillow"])
def test_an_image_whose_damage_only_the_decoder_finds(folder: Path, decoder: str) -> None:
    """The file's header and end are intact, but it cannot be decoded, and the batches are built again."""
    loader = open_loader(folder, image_decoder=decoder)
    png = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(png, "PNG")
    broken = bytearray(png.getvalue())
    broken[200:5000] = bytes(4800)
    (folder / FILE).write_bytes(bytes(broken))
    assert indices_of(loader) == REPLACED
    (reported,) = loader.bad_samples.new_messages()
    assert "05.jpg cannot be decoded" in reported
    assert len(indices_of(loader)) == IMAGES  # the loader can be used further
    loader.close()


def test_an_image_without_a_label_map_is_replaced(folder: Path, tmp_path: Path) -> None:
    maps = tmp_path / "maps" / "a"
    maps.mkdir(parents=True)
    for number in range(IMAGES):
        torch.save(torch.zeros(2, 1, 3, 3), maps / f"{number:02d}.pt")
    loader = open_loader(folder, maps.parent)
    (maps / f"{DAMAGED:02d}.pt").unlink()
    assert indices_of(loader) == REPLACED
    (reported,) = loader.bad_samples.new_messages()
    assert "05" in reported
    loader.close()


def unusual_images() -> dict[str, Image.Image]:
    colours = smooth(70, 50, seed=3)
    alpha = colours.copy()
    alpha.putalpha(Image.linear_gradient("L").resize((70, 50)))
    return {
        "cmyk.jpg": colours.convert("CMYK"),
        "gray.jpg": colours.convert("L"),
        "gray.png": colours.convert("L"),
        "alpha.png": alpha,
        "palette.png": colours.convert("P"),
        "gray_alpha.png": alpha.convert("LA"),
        "bits.png": colours.convert("1"),
        "picture.webp": colours,
        "picture.bmp": colours,
        "picture.tif": colours,
        "wrong_ending.jpg": colours,
        "one_pixel.png": colours.resize((1, 1)),
    }


@pytest.mark.parametrize("name", [*unusual_images(), "turned.jpg", "turned.tif"])
def test_unusual_images_are_read_as_by_pillow(tmp_path: Path, name: str) -> None:
    """Evaluation pixels equal those of timm, which resizes after convert("RGB")."""
    file = tmp_path / "val" / "a" / name
    file.parent.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    if name.startswith("turned"):
        smooth(70, 50, seed=3).save(file, exif=exif)
    else:
        picture = unusual_images()[name]
        picture.save(
            file,
            "PNG" if name.startswith("wrong") else None,
            **({"lossless": True} if "webp" in name else {}),
        )
    with Image.open(file) as image:
        expected = np.asarray(image.convert("RGB"))
        size = (image.height, image.width)
    catalog = build_catalog(str(tmp_path), "val", None)
    assert read_image(catalog, 0)[1] == size
    if name == "turned.jpg":
        assert size == (50, 70)  # timm ignores the EXIF orientation
    (images,) = unnormalised(evaluated_images(catalog, Data(batch_size=1)))
    short = [SIDE, SIDE]
    height, width = size
    short[width > height] = int(SIDE * max(size) / min(size))
    resized = Image.fromarray(expected).resize((short[1], short[0]), Image.Resampling.BICUBIC)
    top, left = round((short[0] - SIDE) / 2), round((short[1] - SIDE) / 2)
    theirs = np.asarray(resized)[top : top + SIDE, left : left + SIDE].astype(float)
    difference = np.abs(images.transpose(1, 2, 0) - theirs)
    assert difference.mean() < 1.5


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
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, name[-3:].replace("tif", "tiff"))
        files[name] = content.getvalue()
    pairs = (RAMP >> 4).reshape(-1, 2).astype(np.uint32)
    packed = (pairs[:, :1] << 12 | pairs[:, 1:]).astype(">u4").view(np.uint8).reshape(-1, 4)[:, 1:]
    sixteen = bytearray(files["sixteen.tif"])
    tags = {258: 12, 279: packed.size}  # bits a pixel, and bytes of the one strip
    for tag, value in tags.items():
        place = next(
            sixteen.index(struct.pack("<HHI", tag, kind, 1))
            for kind in (3, 4)
            if struct.pack("<HHI", tag, kind, 1) in sixteen
        )
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
    loader = eval_loader(catalog, settings, image_size=50)
    (batch,) = loader
    loader.close()
    if name in ("integers.tif", "floats.tif"):
        (message,) = loader.bad_samples.new_messages()
        assert "convert the image to 8 or 16 bits" in message
        return
    pixels = unnormalised(batch.images)[0]
    levels = RAMP / 65535 if name != "twelve.tif" else (RAMP >> 4) / 4095
    expected = np.rint(255 * levels)
    assert np.abs(pixels - expected[:, 10:60]).max() < 1e-3
    assert np.abs(decode_rgb(catalog, 0) - expected[..., None]).max() == 0


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_too_many_pixels_is_replaced(folder: Path) -> None:
    """It has 20 kB; decoded, it would need 1.6 GB."""
    Image.new("1", (13_000, 13_000)).save(folder / FILE, "PNG")
    loader = open_loader(folder)
    assert indices_of(loader) == REPLACED
    message = f"{folder / FILE} has more than 100 million pixels; resize it to use it"
    assert loader.bad_samples.new_messages() == [message]
    loader.close()


@pytest.mark.parametrize("decoder", ["dali", "pillow"])
def test_an_image_of_too_many_pixels_after_resizing_is_left_out(tmp_path: Path, decoder: DecoderName) -> None:
    """With 40 rows this line has 105 million pixels; in a large evaluation it would need 15 GB."""
    images = {"val/a/line.png": Image.new("L", (65_500, 1)), "val/a/plain.png": smooth(60, 90, seed=1)}
    catalog = build_catalog(str(write_images(tmp_path, images)), "val", None)
    settings = Data(batch_size=2, image_decoder=decoder)
    message = (
        f"{tmp_path}/val/a/line.png has more than 100 million pixels when it is resized to 2620000 x 40; "
        "crop it to use it"
    )
    loader = eval_loader(catalog, settings, image_size=40)
    (batch,) = loader
    loader.close()
    assert batch.classes.tolist() == [NO_CLASS, 0]
    assert loader.bad_samples.new_messages() == [message]
