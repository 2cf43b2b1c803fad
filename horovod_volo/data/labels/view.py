"""Show one training image with its token labels, from a store or from published maps."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.figure import LabelledImage, draw_labels
from horovod_volo.data.labels.geometry import coverage
from horovod_volo.data.labels.keys import key_of
from horovod_volo.data.labels.source import open_labels
from horovod_volo.data.labels.store import DESCRIPTION, is_store, read_facts

PROBABILITY = (
    "In each cell: the most probable class. Probability: softmax over all classes, unnamed ones at 0."
)


def draw_sample(labels: str, catalog: Catalog, image: str, picture: Path) -> None:
    """Write the picture of an image, named "CLASS/IMAGE" or by its place in the catalog."""
    index = _index_of(catalog, image)
    source = open_labels(labels, catalog, None)
    try:
        scores, ids = source.read(index)
        encoded = catalog.read(index)
        with Image.open(io.BytesIO(encoded.tobytes())) as opened:
            pixels = opened.convert("RGB")
    except (BadSampleError, OSError) as problem:
        raise UserError(f"{problem}. Choose another image, or mend this one.") from None
    finally:
        source.close()
    top, rows, columns = scores.shape
    drawn = draw_labels(
        LabelledImage(
            image=pixels,
            scores=scores,
            ids=ids,
            classes=catalog.classes,
            title=f"{catalog.name(index)}  (image {index})",
            notes=(
                f"Folder: {catalog.classes[catalog.targets[index]]}, class {catalog.targets[index]}",
                f"Map: {rows} x {columns} cells, {top} classes each. Teacher: {_teacher(Path(labels))}",
                f"A map covers {coverage(source.geometry, assumed=source.geometry_assumed)}",
                PROBABILITY,
            ),
            geometry=source.geometry,
        )
    )
    try:
        with atomic_write(picture) as file:
            drawn.save(file, format="PNG")
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}. Name another file.") from None


def _index_of(catalog: Catalog, image: str) -> int:
    if image.isdecimal():
        if int(image) < len(catalog):
            return int(image)
        raise UserError(f"there is no image {image}: the last one is {len(catalog) - 1}.")
    key = key_of(image)
    for index in range(len(catalog)):
        if key_of(catalog.name(index)) == key:
            return index
    raise UserError(
        f"{catalog.source} has no image {image}. Name it as CLASS/IMAGE, for example {catalog.name(0)}, or "
        f"by a number from 0 to {len(catalog) - 1}."
    )


def _teacher(labels: Path) -> str:
    return read_facts(labels / DESCRIPTION).teacher if is_store(labels) else "unknown"
