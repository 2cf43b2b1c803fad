"""Predicts the classes of image files in one process. Pillow reads and resizes; DALI is not needed.

Invariant: the pixels are those of an evaluation up to rounding: the same resizing, crops and mean.
"""

import html
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from horovod_volo.core.atomic_file import write_text
from horovod_volo.core.center_crop import crop_corners, resized_shapes
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.pillow_pipeline import cropped
from horovod_volo.data.reading import UNDECODABLE, Encoded, decode_rgb, decoded_rgb, resized_shape, to_ppm
from horovod_volo.models.precision import autocast, prepare_precision
from horovod_volo.models.pretrained import PretrainedModel, load_pretrained
from horovod_volo.models.timm_api import described
from horovod_volo.monitor.pictures import inlined_jpeg

Classes = list[tuple[str, float]]  # names and probabilities, the most probable first


def load_network(source: str, flags: Any) -> PretrainedModel:
    """Load a trained network as `flags_of_trained_network` choose it, which are attributes of `flags`."""
    return load_pretrained(
        source,
        name=flags.model,
        image_side=flags.img_size,
        use_ema=flags.use_ema,
        aux_head=flags.aux_head,
        mean=flags.mean,
        std=flags.std,
    )


def predict(
    trained: PretrainedModel,
    images: Sequence[Any],
    bad: list[str],
    *,
    top: int,
    crop_pct: float,
    batch_size: int,
    precision: str,
) -> Iterator[tuple[int, Classes]]:
    """Yield the number and the `top` most probable classes of each image that can be read.

    `images` are paths, bytes of files, PIL images or arrays. Messages on the others go to `bad`. A `crop_pct`
    of 0 is the model's own.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained.network.to(device)
    prepare_precision(trained.network, precision, device)
    names = described(trained.class_names) or [f"class {number}" for number in range(trained.num_classes)]
    side = trained.image_side
    resize = partial(
        resized_shapes,
        image_size=side,
        crop_pct=crop_pct or trained.crop_pct,
        crop_mode=trained.crop_mode,
    )
    mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (trained.mean, trained.std))
    sources = UnlabelledImages(images)
    for first in range(0, len(images), batch_size):
        pixels, shown = [], []
        for number in range(first, min(first + batch_size, len(images))):
            try:
                image = decode_rgb(sources, number)
                height, width, _ = image.shape
                shape = resized_shape(sources, number, (height, width), resize)
                (corner,) = crop_corners(shape[None], side)
                pixels.append(cropped(Image.fromarray(image), shape, corner, side, trained.interpolation))
                shown.append(number)
            except BadSampleError as error:
                bad.append(str(error))
        if not shown:
            continue
        batch = torch.from_numpy(np.stack(pixels)).to(device).movedim(-1, -3)
        with torch.inference_mode(), autocast(precision, device):
            logits = trained.network((batch / 255 - mean) / std)
        shares, classes = logits.float().softmax(dim=1).topk(min(top, logits.shape[1]), dim=1)
        for number, own_shares, own_classes in zip(shown, shares.tolist(), classes.tolist(), strict=True):
            yield number, [(names[c], s) for c, s in zip(own_classes, own_shares, strict=True)]


class UnlabelledImages:
    """Images without labels, to be read like those of a catalog."""

    def __init__(self, images: Sequence[Any]) -> None:
        self._images = images

    def location(self, index: int) -> str:
        """Return the path of an image, or its position, for messages."""
        image = self._images[index]
        return str(image) if isinstance(image, str | os.PathLike) else f"image {index}"

    def read(self, index: int) -> Encoded:
        """Return the bytes of an image file; pixels become PPM."""
        image = self._images[index]
        try:
            if isinstance(image, str | os.PathLike):
                image = Path(image).read_bytes()
            if isinstance(image, bytes | bytearray | memoryview):
                return np.frombuffer(image, np.uint8)
            if not isinstance(image, Image.Image):
                pixels = np.asarray(image)
                if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
                    raise UserError(
                        f"{self.location(index)} is an array of shape {pixels.shape} and {pixels.dtype}. "
                        "Give (height, width, 3) of uint8, a path, the bytes of a file or a PIL image."
                    )
                image = Image.fromarray(pixels)
            return to_ppm(image)
        except UNDECODABLE as error:
            raise BadSampleError(f"{self.location(index)} cannot be read: {error}") from error


_THUMBNAIL = (320, 240)  # pixels
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; --line: #8886; }
body { margin: 1.5rem; }
h1 { font-size: 1.3rem; }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); }
figure { margin: 0; padding: .7rem; border: 1px solid var(--line); border-radius: 6px; break-inside: avoid; }
img { width: 100%; height: 12rem; object-fit: contain; }
figcaption { overflow-wrap: anywhere; font-weight: 600; margin: .4rem 0; }
ol { list-style: none; margin: 0; padding: 0; }
li { display: grid; grid-template-columns: 1fr auto; column-gap: .5rem; margin-top: .3rem; }
meter { grid-column: 1 / 3; width: 100%; height: .7rem; }
"""


def write_contact_sheet(path: Path, weights: str, predictions: Sequence[tuple[Path, Classes]]) -> None:
    """Write the page; raise UserError if that is impossible."""
    title = html.escape(f"{len(predictions):,} images, predicted by {weights}")
    page = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1><main>",
        *(_figure(file, classes) for file, classes in predictions),
        "</main></body></html>\n",
    ]
    write_text(path, "\n".join(page), "--html")


def _figure(file: Path, classes: Classes) -> str:
    rows = [
        f"<li><span>{html.escape(name)}</span><span>{100 * share:.1f} %</span>"
        f'<meter value="{share:.4f}" aria-label="{html.escape(name)}"></meter></li>'
        for name, share in classes
    ]
    name, small = html.escape(file.name), decoded_rgb(file.read_bytes())
    small.thumbnail(_THUMBNAIL)
    return (
        f'<figure><img loading="lazy" src="{inlined_jpeg(small)}" alt="{name}">'
        f"<figcaption>{name}</figcaption><ol>{''.join(rows)}</ol></figure>"
    )
