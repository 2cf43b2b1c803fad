"""Where label maps lie in their images, told by a teacher: it labels some images on two hypotheses.

For each image the teacher labels what the maps are recorded to cover, and what they would cover otherwise.
Both are compared with the stored map by the correlation of where in the map each class is likely and where
it is not; which classes are likely on average plays no part, since it is alike on both hypotheses. It takes
no knowledge of who made the maps: any trained teacher of the same classes will do.
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
from horovod_volo.labelling.generate import colours_of
from horovod_volo.models.teacher import Teacher, load_teacher

Progress = Callable[[int, int], None]  # images labelled, of how many
LEAST_CELLS = 0.5  # by which what a map covers must differ between the hypotheses
STANDARD_ERRORS = 2.0  # beyond which a mean difference is taken for one


@dataclass(frozen=True)
class Comparison:
    """Which maps are compared with which teacher, on how many images."""

    labels: Path
    geometry: MapGeometry | None  # what the maps are said to cover; None: as they are recorded
    teacher: str
    weights: str
    pretrained: bool
    image_side: int
    batch: int
    images: int


@dataclass(frozen=True, eq=False)
class Fit:
    """How well maps fit a teacher as they are recorded, and otherwise."""

    teacher: str
    recorded: MapGeometry
    assumed: bool
    other: MapGeometry
    correlations: NDArray[np.float64]  # (images, 2) as recorded, and otherwise

    @property
    def means(self) -> tuple[float, float]:
        """Return the mean correlations as recorded and otherwise; 0 where there is none."""
        recorded, other = self.correlations.mean(axis=0) if len(self.correlations) else (0.0, 0.0)
        return float(recorded), float(other)

    @property
    def better(self) -> MapGeometry | None:
        """Return the hypothesis that fits better; None where the images do not tell."""
        if len(self.correlations) < 2:
            return None
        gain = self.correlations[:, 0] - self.correlations[:, 1]  # (images,)
        bound = STANDARD_ERRORS * gain.std(ddof=1) / np.sqrt(len(gain))
        if abs(gain.mean()) <= bound:
            return None
        return self.recorded if gain.mean() > 0 else self.other


def compare_geometries(asked: Comparison, catalog: Catalog, progress: Progress) -> Fit:
    """Compare the maps of images spread over a catalog; images that do not tell are left out.

    These are the ones without a map, and those of which both hypotheses show the same, such as square ones.
    """
    resources = rank_resources(World.single())
    teacher = load_teacher(
        asked.teacher,
        weights=asked.weights,
        pretrained=asked.pretrained,
        image_side=asked.image_side,
        classes=len(catalog.classes),
    ).on(resources.device)
    with closing(open_labels(str(asked.labels), catalog, None, asked.geometry)) as labels:
        recorded = labels.geometry
        other = WHOLE if recorded != WHOLE else PUBLISHED
        spread = np.linspace(0, len(catalog) - 1, asked.images).round().astype(np.int64)
        maps = _telling_maps(np.unique(spread).tolist(), labels, catalog, (recorded, other))
        assumed = labels.geometry_assumed
    found: list[dict[int, float]] = []  # by the places of images
    for number, geometry in enumerate((recorded, other)):
        images = TeacherImages(
            catalog,
            image_size=teacher.image_side,
            batch=asked.batch,
            device=resources.device,
            threads=resources.threads,
            geometry=geometry,
        )
        with closing(images):
            found.append(_correlations(maps, images, teacher, len(catalog.classes)))
        progress((number + 1) * len(maps), 2 * len(maps))
    pairs = [(found[0][index], found[1][index]) for index in found[0] if index in found[1]]
    correlations = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return Fit(teacher.name, recorded, assumed, other, correlations)


def _telling_maps(
    indices: Sequence[int],
    labels: LabelSource,
    catalog: Catalog,
    hypotheses: tuple[MapGeometry, MapGeometry],
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the scores and ids, (k, rows, columns) each, of images that the hypotheses show differently."""
    maps = {}
    for index in indices:
        try:
            size = np.array([read_image(catalog, index)[1]])
            scores, ids = labels.read(index)
        except BadSampleError:
            continue
        recorded, other = (geometry.covered(size) for geometry in hypotheses)
        if np.abs(recorded - other).max() * max(scores.shape[1:]) > LEAST_CELLS:
            maps[index] = torch.from_numpy(scores).float(), torch.from_numpy(ids).long()
    return maps


def _correlations(
    maps: dict[int, tuple[Tensor, Tensor]], images: TeacherImages, teacher: Teacher, classes: int
) -> dict[int, float]:
    """Return the correlation of each image's map with the teacher's labels of what is shown of it."""
    found = {}
    for places, pixels in images.batches(list(maps)):
        logits = teacher.label(colours_of(pixels)).float().cpu()  # (images, classes, rows, columns)
        for place, of_image in zip(places, logits, strict=True):
            correlation = whereabouts_correlation(*maps[place], of_image, classes)
            if correlation is not None:
                found[place] = correlation
    return found


def whereabouts_correlation(scores: Tensor, ids: Tensor, logits: Tensor, classes: int) -> float | None:
    """Return how alike a map and a teacher's logits (classes, rows, columns) place classes.

    The map's scores and ids are (k, rows, columns). None where either says the same of all places.
    """
    if logits.shape[1:] != scores.shape[1:]:
        logits = interpolate(logits[None], scores.shape[1:], mode="bilinear", antialias=True)[0]
    best = logits.topk(len(scores), dim=0)
    placed = []
    for values, numbers in ((scores, ids), (best.values, best.indices)):
        dense = torch.zeros(classes, *scores.shape[1:]).scatter_(0, numbers, values)
        likely = dense.softmax(dim=0).flatten(1).double()  # (classes, cells) as training reads a map
        deviation = likely - likely.mean(dim=1, keepdim=True)
        placed.append(deviation / deviation.norm())
    correlation = float((placed[0] * placed[1]).sum())
    return correlation if math.isfinite(correlation) else None
