"""Write a figure of one training image and its label map."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.reading import decode_rgb
from horovod_volo.labelling.figure import LabelledImage, draw_labels
from horovod_volo.token_labels.geometry import describe_coverage
from horovod_volo.token_labels.keys import label_key, names_of
from horovod_volo.token_labels.source import open_labels

PROBABILITY = "Each cell: its most probable class, by a softmax in which logits that are not stored are 0."


def draw_sample(labels: str, catalog: Catalog, image: str, picture: Path) -> None:
    """Write the figure of an image, given as "CLASS/IMAGE" or by its index in the catalog."""
    index = _index_of(catalog, image)
    source = open_labels(labels, catalog, None)
    try:
        scores, ids = source.read(index)
        pixels = Image.fromarray(decode_rgb(catalog, index))
    except BadSampleError as problem:
        raise UserError(f"{problem}. Choose another image, or repair this one.") from None
    finally:
        source.close()
    top, rows, columns = scores.shape
    figure = draw_labels(
        LabelledImage(
            image=pixels,
            scores=scores,
            ids=ids,
            classes=catalog.classes,
            title=f"{catalog.name(index)}  (image {index})",
            captions=(
                f"Folder: {catalog.classes[catalog.targets[index]]}, class {catalog.targets[index]}",
                f"Map: {rows} x {columns} cells, {top} classes each. Teacher: {source.teacher}",
                f"A map covers {describe_coverage(source.geometry, assumed=source.geometry_assumed)}",
                PROBABILITY,
            ),
            geometry=source.geometry,
        )
    )
    try:
        with atomic_write(picture) as file:
            figure.save(file, format="PNG")
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}. Name another file.") from None


def _index_of(catalog: Catalog, image: str) -> int:
    if image.isdecimal():
        if int(image) < len(catalog):
            return int(image)
        raise UserError(f"there is no image {image}: the last index is {len(catalog) - 1}.")
    names = list(names_of(catalog))
    found = [index for index, name in enumerate(names) if image in (name, label_key(name))]
    if image in names or len(found) == 1:
        return names.index(image) if image in names else found[0]
    raise UserError(
        f"{catalog.source} has {'several images' if found else 'no image'} {image}. Give CLASS/IMAGE, for "
        f"example {names[found[0] if found else 0]}, or an index from 0 to {len(catalog) - 1}."
    )
