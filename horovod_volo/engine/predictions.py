"""The predicted class of every image of an evaluation, collected over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS, EvalBatch


class PredictionCollector:
    """Collects the predicted classes of this rank's images on the device, without synchronising with it."""

    def __init__(self) -> None:
        self.done = 0  # images of this rank
        self._indices: list[NDArray[np.int64]] = []
        self._predictions: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def add(self, batch: EvalBatch, predictions: Tensor, probabilities: Tensor) -> None:
        """Add the predicted classes of a batch and their probabilities, both (batch,).

        Damaged images get NO_CLASS.
        """
        self._indices.append(batch.indices)
        self._predictions.append(torch.where(batch.classes == NO_CLASS, NO_CLASS, predictions))
        self._probabilities.append(probabilities)
        self.done += len(batch.indices)

    def gather(self, world: World, images: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the predicted class of every image of the catalog and its probability, both (images,).

        Collective: every rank calls this.
        """
        own: tuple[NDArray[Any], ...] = (
            np.empty(0, np.int64),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
        )
        if self._indices:
            own = (
                np.concatenate(self._indices),
                torch.cat(self._predictions).to(torch.int32).cpu().numpy(),
                torch.cat(self._probabilities).float().cpu().numpy(),
            )
        predictions, probabilities = np.full(images, NO_CLASS), np.zeros(images, np.float32)
        for of_rank, rank_predictions, rank_probabilities in world.allgather_object(own):
            predictions[of_rank] = rank_predictions
            probabilities[of_rank] = np.nan_to_num(rank_probabilities)
        return predictions, probabilities
