"""Verify the geometry of label maps with a teacher: does the recorded or the other geometry fit better?

For each geometry the teacher labels the part of each image that the map would cover, and its class
probabilities are correlated over the cells with those of the stored map. The mean of every class is
subtracted first, because it is nearly the same for both geometries. Any trained teacher of the same classes
will do; it need not be the one that made the maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import PUBLISHED, WHOLE, MapGeometry
from horovod_volo.data.labels.source import LabelSource, open_labels
from horovod_volo.data.reading import read_image
from horovod_volo.data.teacher_images import TeacherImages
from horovod_volo.labelling.generate import denormalize
from horovod_volo.models.teacher import Teacher, load_teacher

Progress = Callable[[int, int], None]  # images labelled, images in all
MIN_SHIFT_CELLS = 0.5  # images whose cells move less than this between the geometries are left out
STANDARD_ERRORS = 2.0  # a mean difference below this many standard errors is undecided


@dataclass(frozen=True)
class GeometryRequest:
    """The maps to compare, the teacher, and the number of images."""

    labels: Path
    geometry: MapGeometry | None  # instead of the recorded one
    teacher: str
    weights: str
    pretrained: bool
    image_size: int
    batch_size: int
    images: int


@dataclass(frozen=True, eq=False)
class GeometryResult:
    """Correlations of maps with a teacher under the recorded and the other geometry."""

    teacher: str
    recorded: MapGeometry
    assumed: bool  # `recorded` is assumed
    other: MapGeometry
    correlations: NDArray[np.float64]  # (images, 2): recorded, other

    @property
    def means(self) -> tuple[float, float]:
        """Return the mean correlations under the recorded and the other geometry; 0 without images."""
        recorded, other = self.correlations.mean(axis=0) if len(self.correlations) else (0.0, 0.0)
        return float(recorded), float(other)

    @property
    def better(self) -> MapGeometry | None:
        """Return the geometry with the higher mean correlation; None if the difference is not significant."""
        if len(self.correlations) < 2:
            return None
        gain = self.correlations[:, 0] - self.correlations[:, 1]  # (images,)
        bound = STANDARD_ERRORS * gain.std(ddof=1) / np.sqrt(len(gain))
        if abs(gain.mean()) <= bound:
            return None
        return self.recorded if gain.mean() > 0 else self.other


def compare_geometries(request: GeometryRequest, catalog: Catalog, progress: Progress) -> GeometryResult:
    """Correlate the maps of images spread over a catalog with a teacher, under two geometries.

    Images without a map, and those for which both geometries are the same, such as square ones, are left out.
    """
    resources = rank_resources(World.single())
    teacher = load_teacher(
        request.teacher,
        weights=request.weights,
        pretrained=request.pretrained,
        image_side=request.image_size,
        classes=len(catalog.classes),
    ).on(resources.device)
    with closing(open_labels(str(request.labels), catalog, None, request.geometry)) as labels:
        recorded = labels.geometry
        other = WHOLE if recorded != WHOLE else PUBLISHED
        spread = np.linspace(0, len(catalog) - 1, request.images).round().astype(np.int64)
        maps = _informative_maps(np.unique(spread).tolist(), labels, catalog, (recorded, other))
        assumed = labels.geometry_assumed
    by_geometry: list[dict[int, float]] = []  # correlation by image index
    for number, geometry in enumerate((recorded, other)):
        images = TeacherImages(
            catalog,
            image_size=teacher.image_side,
            batch=request.batch_size,
            device=resources.device,
            threads=resources.threads,
            geometry=geometry,
        )
        with closing(images):
            by_geometry.append(_correlations(maps, images, teacher, len(catalog.classes)))
        progress((number + 1) * len(maps), 2 * len(maps))
    pairs = [
        (by_geometry[0][index], by_geometry[1][index]) for index in by_geometry[0] if index in by_geometry[1]
    ]
    correlations = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return GeometryResult(teacher.name, recorded, assumed, other, correlations)


def _informative_maps(
    indices: Sequence[int],
    labels: LabelSource,
    catalog: Catalog,
    geometries: tuple[MapGeometry, MapGeometry],
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return logits and ids (k, height, width) by index, of images that the geometries cover differently."""
    maps = {}
    for index in indices:
        try:
            size = np.array([read_image(catalog, index)[1]])
            scores, ids = labels.read(index)
        except BadSampleError:
            continue
        recorded, other = (geometry.covered(size) for geometry in geometries)
        if np.abs(recorded - other).max() * max(scores.shape[1:]) > MIN_SHIFT_CELLS:
            maps[index] = torch.from_numpy(scores).float(), torch.from_numpy(ids).long()
    return maps


def _correlations(
    maps: dict[int, tuple[Tensor, Tensor]], images: TeacherImages, teacher: Teacher, classes: int
) -> dict[int, float]:
    """Return by image index the correlation of its map with the teacher's logits."""
    correlations = {}
    for indices, pixels in images.batches(list(maps)):
        logits = teacher.label(denormalize(pixels)).float().cpu()  # (images, classes, height, width)
        for index, image_logits in zip(indices, logits, strict=True):
            correlation = spatial_correlation(*maps[index], image_logits, classes)
            if correlation is not None:
                correlations[index] = correlation
    return correlations


def spatial_correlation(scores: Tensor, ids: Tensor, logits: Tensor, classes: int) -> float | None:
    """Return the correlation over cells of the class probabilities of a map and of a teacher.

    `scores` and `ids` (k, height, width) are the map. Of the teacher's `logits` (classes, height, width) the
    k highest are used, as in the map. Return None if either is the same in all cells.
    """
    if logits.shape[1:] != scores.shape[1:]:
        logits = interpolate(logits[None], scores.shape[1:], mode="bilinear", antialias=True)[0]
    best = logits.topk(len(scores), dim=0)
    normalized = []
    for values, numbers in ((scores, ids), (best.values, best.indices)):
        dense = torch.zeros(classes, *scores.shape[1:]).scatter_(0, numbers, values)
        probabilities = dense.softmax(dim=0).flatten(1).double()  # (classes, cells), as in the token loss
        deviation = probabilities - probabilities.mean(dim=1, keepdim=True)
        normalized.append(deviation / deviation.norm())
    correlation = float((normalized[0] * normalized[1]).sum())
    return correlation if math.isfinite(correlation) else None
