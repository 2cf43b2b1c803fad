"""Pack images into tar shards, each with the number of its class; larger ones are shrunk if requested."""

import io
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from horovod_volo.core.errors import BadSampleError
from horovod_volo.data.images.catalog import Catalog, build_catalog, check_same_classes, open_catalog
from horovod_volo.data.images.split_folder import FOLDER_NAMES, Format, Split
from horovod_volo.data.packing import packed_split
from horovod_volo.data.packing.manifest import publish_catalog
from horovod_volo.data.packing.records import open_records
from horovod_volo.data.reading import IMAGE_ENDINGS, START_BYTES, UNDECODABLE, ending_of, open_image, to_rgb
from horovod_volo.data.sampler import packing_order

_DRAFT_SCALE = 8  # decoding a JPEG at 1/8 scale is fast and still reads the whole file


@dataclass(frozen=True)
class PackOptions:
    """Options of a pack; they and the images determine the content of the shards."""

    shard_images: int = 0  # 0: as many as fill `shard_bytes`
    shard_bytes: int = 256 * 10**6
    shorter_side: int = 0  # pixels; 0: images are packed unchanged
    quality: int = 95
    seed: int = 0
    shuffle: bool = True


def pack(
    data_dir: Path,
    out: Path,
    options: PackOptions,
    *,
    workers: int,
    progress: Callable[[Split], packed_split.Progress],
    records: Format | None = None,
) -> list[str]:
    """Pack both splits, or resume; return one message for each image that was left out.

    With `records` the images are in shards of this format, which are converted.
    """
    packed_split.check_packed(out)
    work = out / packed_split.WORK
    catalogs = {split: build_catalog(str(data_dir), split, work, records=records) for split in FOLDER_NAMES}
    check_same_classes(catalogs["train"], catalogs["val"])
    left_out = []
    for split, catalog in catalogs.items():
        assert catalog.path is not None  # it was listed into a folder
        images, source = len(catalog), str(data_dir.resolve())
        shuffled = packing_order(options.seed, images) if options.shuffle else None
        content = packed_split.SplitContent(
            classes=catalog.classes,
            order=np.arange(images, dtype=np.uint32) if shuffled is None else shuffled,
            shard_images=options.shard_images,
            shard_bytes=options.shard_bytes,
            provenance=asdict(options) | {"catalog": catalog.digest, "images": images, "source": source},
            open=partial(_open_images, catalog.path, catalog.digest, options, records),
        )
        left_out += packed_split.pack_split(content, out, split, workers=workers, progress=progress(split))
        catalog.close()
        publish_catalog(str(out), split)
    shutil.rmtree(work, ignore_errors=True)  # NFS keeps the names of open files
    return left_out


def _open_images(
    path: Path, digest: str, options: PackOptions, records: Format | None
) -> packed_split.ReadSample:
    catalog = open_records(path, digest, records) if records else open_catalog(path, digest)
    return partial(_read_image, catalog, options)


def _read_image(catalog: Catalog, options: PackOptions, index: int) -> packed_split.Sample:
    encoded = catalog.read(index).tobytes()
    try:
        name, image = _packed_image(catalog.name(index), encoded, options)
    except BadSampleError as error:
        raise BadSampleError(f"{catalog.location(index)} {error}") from error
    name = name.lstrip("/")  # of a class such as /m/01g317
    folder, _, base = name.rpartition("/")
    label = f"{folder}/{base.partition('.')[0]}.cls"
    return (name, image), (label, str(int(catalog.targets[index])).encode())


def _packed_image(name: str, encoded: bytes, options: PackOptions) -> tuple[str, bytes]:
    """Return the name and bytes to pack; raise BadSampleError if the image cannot be decoded.

    With `shorter_side` larger images are resized to that length of the shorter side and encoded as JPEG. All
    other images are packed unchanged.
    """
    shorter_side = options.shorter_side
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and invalid metadata decode nevertheless
            with open_image(encoded) as image:
                if shorter_side and min(image.size) > shorter_side:
                    is_jpeg = name.lower().endswith((".jpg", ".jpeg"))
                    return name if is_jpeg else f"{name}.jpg", _shrink(image, shorter_side, options.quality)
                width, height = (max(1, length // _DRAFT_SCALE) for length in image.size)
                image.draft(None, (width, height))
                image.load()
    except UNDECODABLE as error:
        raise BadSampleError(f"cannot be decoded: {error}") from error
    if name.lower().endswith(IMAGE_ENDINGS):
        return name, encoded
    ending = ending_of(encoded[:START_BYTES])
    return f"{name}{ending if ending in IMAGE_ENDINGS else IMAGE_ENDINGS[0]}", encoded


def _shrink(image: Image.Image, shorter_side: int, quality: int) -> bytes:
    scale = shorter_side / min(image.size)
    size = (max(shorter_side, round(image.width * scale)), max(shorter_side, round(image.height * scale)))
    stream = io.BytesIO()
    to_rgb(image).resize(size, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=quality)
    return stream.getvalue()
