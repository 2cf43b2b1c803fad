"""The data sets that a Python program gives to a run, as lists of images on all ranks.

Invariant: rank 0 reads the labels, and all ranks number the classes by them. The ranks' samples must be the
same.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog_file import Label
from horovod_volo.data.images.given_images import (
    GivenImages,
    HuggingFaceSamples,
    Numbering,
    SampleSequence,
    held_out_positions,
    is_hugging_face,
    number_labels,
    read_labels,
)
from horovod_volo.data.images.split_folder import shortened
from horovod_volo.engine.task import check_classes
from horovod_volo.monitor.progress import ThroughputLine


class LabelledSamples(NamedTuple):
    """The samples of a data set, their labels, and the names of its classes, if it has them."""

    samples: SampleSequence
    labels: list[Label]
    classes: tuple[str, ...] | None
    source: str


@dataclass(frozen=True)
class GivenData:
    """The data sets of a run, and the name that tells them from others with the same labels."""

    train: Any
    held_out: Any = None  # None: a share of the training samples is held out
    identity: str = ""
    _known: dict[str, LabelledSamples] = field(default_factory=dict)  # what was read of both, by kind

    def lists(self, config: Config, world: World) -> tuple[GivenImages, GivenImages]:
        """Return the lists of training and held-out images. Collective: every rank calls this."""
        train = self._read("training", self.train, world)
        numbering = world.run_on_all_ranks(lambda: number_labels(train.labels, train.classes, train.source))
        if self.held_out is None:
            parts = world.run_on_all_ranks(lambda: _parts(train, config))
            images, held_out = (self._list(train, part, numbering, world) for part in parts)
        else:
            images = self._list(train, None, numbering, world)
            held_out = self._all_of(self._read("held-out", self.held_out, world), numbering, world)
        world.run_on_all_ranks(lambda: check_classes(config, images, train.source))
        return images, held_out

    def list_of(self, dataset: Any, classes: tuple[str, ...], world: World) -> GivenImages:
        """Return the list of a data set with the classes of a trained network. Collective."""
        numbering = number_labels([], classes, "network")
        if self.train is not None:
            train = self._read("training", self.train, world)
            numbering = number_labels(train.labels, train.classes, train.source)
        return self._all_of(_labelled(dataset, "held-out", world), numbering, world)

    def _read(self, kind: str, dataset: Any, world: World) -> LabelledSamples:
        if kind not in self._known:
            self._known[kind] = _labelled(dataset, kind, world)
        return self._known[kind]

    def _all_of(self, given: LabelledSamples, numbering: Numbering, world: World) -> GivenImages:
        matched = world.run_on_all_ranks(lambda: _matched(given, numbering))
        return self._list(given, None, matched, world)

    def _list(
        self, given: LabelledSamples, positions: NDArray[np.int64] | None, numbering: Numbering, world: World
    ) -> GivenImages:
        """Build a list, and read one sample, so that a wrong type is an error now. Collective."""

        def build() -> GivenImages:
            chosen = np.arange(len(given.labels), dtype=np.int64) if positions is None else positions
            images = GivenImages(
                given.samples, chosen, given.labels, numbering, source=given.source, identity=self.identity
            )
            with suppress(BadSampleError):  # it is replaced like any other
                images.read(0)
            return images

        return world.run_on_all_ranks(build)


def _labelled(dataset: Any, kind: str, world: World) -> LabelledSamples:
    """Return the samples of a data set, with the labels that rank 0 reads. Collective."""
    source = f"{kind} data set ({type(dataset).__name__})"
    samples = world.run_on_all_ranks(lambda: _samples(dataset, source))
    line = ThroughputLine("labels read", shown=world.is_rank_zero)
    labels: list[Label] = world.run_on_rank_zero(lambda: read_labels(samples, source, line))
    if len(set(world.allgather_object(len(samples)))) > 1:
        raise AllRanksError(f"the {source} has another number of samples on some ranks. Give all the same.")
    classes = getattr(samples, "classes", None)
    return LabelledSamples(samples, labels, None if classes is None else tuple(map(str, classes)), source)


def _samples(dataset: Any, source: str) -> SampleSequence:
    if is_hugging_face(dataset):
        return HuggingFaceSamples(dataset)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"the {source} is not indexable. Give an object with __len__ and __getitem__, such as a list of "
            "pairs (image, label)."
        )
    samples: SampleSequence = dataset
    return samples


def _matched(given: LabelledSamples, numbering: Numbering) -> Numbering:
    """Return the numbers that the labels of a data set have in training: by name, if it names its classes."""
    if given.classes is None:
        return numbering
    if unknown := sorted(set(given.classes) - set(numbering.classes)):
        raise UserError(
            f"the {given.source} has classes that training lacks: {shortened(unknown)}. Its classes are "
            f"{shortened(numbering.classes)}. Name them alike, or leave the others out."
        )
    by_name: dict[Label, int] = {name: numbering.classes.index(name) for name in given.classes}
    by_number: dict[Label, int] = {number: by_name[name] for number, name in enumerate(given.classes)}
    return Numbering(numbering.classes, by_name | by_number)


def _parts(train: LabelledSamples, config: Config) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not config.data.val_share:
        raise UserError(
            f"val is not given, and val_share=0 holds nothing out of the {train.source}. Give val."
        )
    return held_out_positions(train.labels, config.data.val_share, config.run.seed)
