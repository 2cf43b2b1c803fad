"""Small data sets of painted boxes, in COCO's layout, a rank that reads them, the distance of samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.schema import Config
from horovod_volo.dense.dense_batches import RankContext

CATEGORIES = ({"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 18, "name": "dog"})
COLORS = {1: (255, 0, 0), 18: (0, 255, 0), 90: (0, 0, 255)}


def annotation(image: int, box: tuple[float, ...], category: int = 1, **changes: Any) -> dict[str, Any]:
    area = box[2] * box[3]
    base = {"image_id": image, "category_id": category, "bbox": list(box), "area": area, "iscrowd": 0}
    return base | changes


def write_coco(
    root: Path,
    images: list[dict[str, Any]],
    annotations: list[dict[str, Any]],
    split: str = "train2017",
    **content: Any,
) -> Path:
    """Write grey images and a file of annotations; return that."""
    (root / split).mkdir(parents=True, exist_ok=True)
    for image in images:
        pixels = np.full((image["height"], image["width"], 3), 128, dtype=np.uint8)
        for each in annotations:
            if each["image_id"] == image["id"]:
                left, top, width, height = (round(side) for side in each["bbox"])
                pixels[top : top + height, left : left + width] = COLORS[each["category_id"]]
        Image.fromarray(pixels).save(root / split / image["file_name"])
    path = root / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(exist_ok=True)
    listed = {"images": images, "annotations": annotations, "categories": list(CATEGORIES)} | content
    path.write_text(json.dumps(listed))
    return path


def image(number: int, width: int, height: int, name: str = "") -> dict[str, Any]:
    return {"id": number, "file_name": name or f"{number:012}.png", "width": width, "height": height}


def rank_alone(**groups: Any) -> RankContext:
    """Return the only rank of a run with these groups of settings."""
    return RankContext(Config(**groups), World.single(), RankResources(torch.device("cpu"), 2, ""))


def kolmogorov(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return the largest distance between the distribution functions of two samples, to four decimals."""
    first, second = (np.asarray(sample, np.float64).round(4) for sample in (first, second))
    values = np.union1d(first, second)
    shares = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())
