"""Verify label maps with a teacher: are they of these images, and in the recorded or the other geometry?

For each geometry the teacher labels the part of each image that the map would cover, and its class
probabilities are correlated over the cells with those of the stored map. The mean of every class is
subtracted first, because it is nearly the same for both geometries. Under the recorded geometry the
probabilities themselves are compared too. Any trained teacher of the same classes will do for the geometry;
in the probabilities only the one that made the maps has to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.core.errors import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.reading import read_image
from horovod_volo.labelling.generate import centred
from horovod_volo.labelling.teacher import Teacher, TeacherChoice, TeacherImages, denormalize, load_teacher
from horovod_volo.token_labels.geometry import PUBLISHED, WHOLE, MapGeometry
from horovod_volo.token_labels.source import LabelSource, open_labels

Progress = Callable[[int, int], None]  # images labelled, images in all
MIN_SHIFT_CELLS = 0.5  # images whose cells move less than this between the geometries are left out
# Total variation distance of a map from the teacher that made it, averaged over cells. It is due to rounding
# and other decoders. A right map may be at any distance from another teacher.
SAME_TEACHER_LIMIT = 0.1
STANDARD_ERRORS = 2.0  # a mean difference below this many standard errors is undecided


@dataclass(frozen=True, eq=False)
class GeometryResult:
    """Distances of maps from a teacher, and correlations under the recorded and the other geometry."""

    teacher: str
    made_maps: bool  # this teacher made the maps
    distances: Mapping[str, float]  # total variation, by the image's name
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

    @property
    def distance(self) -> float:
        """Return the mean distance; 0 without images."""
        return sum(self.distances.values()) / max(1, len(self.distances))

    @property
    def problem(self) -> str:
        """Return how the maps disagree with the teacher, and the remedy; empty: they agree."""
        if self.better == self.other:
            return (
                f"the maps cover {self.other.description}, not {self.recorded.description}. Import them "
                f"again with --map-geometry {self.other}, or train with it."
            )
        most, worst = max(((distance, name) for name, distance in self.distances.items()), default=(0, ""))
        if not self.made_maps or most <= SAME_TEACHER_LIMIT:
            return ""
        return (
            f"the maps do not have the probabilities that this teacher gives, least of all that of {worst}. "
            "Generate maps of these images again."
        )


def compare_geometries(
    store: Path,
    geometry: MapGeometry | None,
    catalog: Catalog,
    choice: TeacherChoice,
    images: int,
    progress: Progress,
) -> GeometryResult:
    """Compare the maps of so many images spread over a catalog with a teacher, under two geometries.

    `geometry` is that of the maps; None: the recorded one. Images without a map are left out; of the
    correlations, also those for which both geometries are the same, such as square ones.
    """
    resources = rank_resources(World.single())
    teacher = load_teacher(choice, len(catalog.classes)).on(resources.device)
    with closing(open_labels(str(store), catalog, None, geometry)) as labels:
        recorded = labels.geometry
        other = WHOLE if recorded != WHOLE else PUBLISHED
        spread = np.linspace(0, len(catalog) - 1, images).round().astype(np.int64)
        maps = _read_maps(np.unique(spread).tolist(), labels, catalog, (recorded, other))
    by_geometry: list[dict[int, tuple[float | None, float]]] = []  # correlation and distance by image index
    for number, shown in enumerate((recorded, other)):
        teacher_images = TeacherImages(
            catalog,
            image_size=teacher.image_side,
            batch=choice.batch_size,
            device=resources.device,
            threads=resources.threads,
            geometry=shown,
        )
        with closing(teacher_images):
            by_geometry.append(_compare(maps, teacher_images, teacher, labels.generated))
        progress((number + 1) * len(maps), 2 * len(maps))
    of_recorded, of_other = by_geometry
    pairs = [(of_recorded[index][0], of_other[index][0]) for index in of_recorded if index in of_other]
    distances = {catalog.name(index): distance for index, (_, distance) in of_recorded.items()}
    correlations = np.array([pair for pair in pairs if None not in pair], np.float64).reshape(-1, 2)
    made_maps, assumed = teacher.name == labels.teacher, labels.geometry_assumed
    return GeometryResult(teacher.name, made_maps, distances, recorded, assumed, other, correlations)


def _read_maps(
    indices: Sequence[int],
    labels: LabelSource,
    catalog: Catalog,
    geometries: tuple[MapGeometry, MapGeometry],
) -> dict[int, tuple[Tensor, Tensor, bool]]:
    """Return logits and ids (k, height, width) by index, and whether the geometries differ for this image."""
    maps = {}
    for index in indices:
        try:
            size = np.array([read_image(catalog, index)[1]])
            scores, ids = labels.read(index)
        except BadSampleError:
            continue
        recorded, other = (geometry.covered(size) for geometry in geometries)
        differs = bool(np.abs(recorded - other).max() * max(scores.shape[1:]) > MIN_SHIFT_CELLS)
        maps[index] = torch.from_numpy(scores).float(), torch.from_numpy(ids).long(), differs
    return maps


def _compare(
    maps: dict[int, tuple[Tensor, Tensor, bool]], images: TeacherImages, teacher: Teacher, generated: bool
) -> dict[int, tuple[float | None, float]]:
    """Return by image index the correlation of its map with the teacher, and their distance."""
    found = {}
    for indices, pixels in images.batches(list(maps)):
        batch = teacher.label(denormalize(pixels)).float().cpu()  # (images, classes, height, width)
        for index, logits in zip(indices, batch, strict=True):
            scores, ids, differs = maps[index]
            if logits.shape[1:] != scores.shape[1:]:
                logits = interpolate(logits[None], scores.shape[1:], mode="bilinear", antialias=True)[0]
            if generated:
                logits = centred(logits[None], len(scores))[0]
            correlation = spatial_correlation(scores, ids, logits, len(logits)) if differs else None
            found[index] = correlation, total_variation(scores, ids, logits)
    return found


def total_variation(scores: Tensor, ids: Tensor, logits: Tensor) -> float:
    """Return the total variation distance of a map from a teacher's softmax, averaged over cells.

    `scores` and `ids` (k, height, width) are the map, `logits` (classes, height, width) the teacher's. The
    classes outside the map's k count as one, because the map only has the sum of their probabilities.
    """
    dense = torch.zeros_like(logits).scatter_(0, ids, scores)  # as in the token loss
    excess = (dense.softmax(dim=0) - logits.softmax(dim=0)).gather(0, ids)  # (k, height, width)
    return float((excess.abs().sum(dim=0) + excess.sum(dim=0).abs()).mean() / 2)


def spatial_correlation(scores: Tensor, ids: Tensor, logits: Tensor, classes: int) -> float | None:
    """Return the correlation over cells of the class probabilities of a map and of a teacher.

    `scores` and `ids` (k, height, width) are the map. Of the teacher's `logits` (classes, height, width) the
    k highest are used, as in the map. Return None if either is the same in all cells.
    """
    best = logits.topk(len(scores), dim=0)
    normalized = []
    for values, numbers in ((scores, ids), (best.values, best.indices)):
        dense = torch.zeros(classes, *scores.shape[1:]).scatter_(0, numbers, values)
        probabilities = dense.softmax(dim=0).flatten(1).double()  # (classes, cells), as in the token loss
        deviation = probabilities - probabilities.mean(dim=1, keepdim=True)
        normalized.append(deviation / deviation.norm())
    correlation = float((normalized[0] * normalized[1]).sum())
    return correlation if math.isfinite(correlation) else None
