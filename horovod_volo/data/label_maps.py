"""The dense label maps of training images, read in their published form.

One file for each image: `<root>/<class>/<image name up to its first dot>.pt`, a tensor saved by
torch of shape [2, k, height, width]: the k highest raw logits of each cell, then their class
numbers. The maps describe the stored image: whoever flips the image must flip its map.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.config.errors import UserError
from horovod_volo.data.catalog import Catalog

Scores = NDArray[np.float16]  # (k, height, width)
Ids = NDArray[np.int32]  # (k, height, width)


class LabelMaps:
    """A folder of label maps."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def read(self, relative_path: str) -> tuple[Scores, Ids]:
        """Return the scores and class numbers of the image at `relative_path`, "CLASS/FILE"."""
        path = self._path_of(relative_path)
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise self._missing(path) from None
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise UserError(
                f"cannot read the label map {path}: {error}. Copy or make this file again."
            ) from error
        return _unpacked(stored, path)

    def check(self, catalog: Catalog) -> None:
        """Refuse a folder that lacks the map of the first image of any class."""
        _, firsts = np.unique(catalog.targets, return_index=True)
        for index in firsts:
            path = self._path_of(catalog.paths[index])
            if not path.is_file():
                raise self._missing(path)
        self.read(catalog.paths[firsts[0]])

    def _path_of(self, relative_path: str) -> Path:
        class_name, file_name = relative_path.rsplit("/", 1)
        return self.root / class_name / f"{file_name.split('.', 1)[0]}.pt"

    def _missing(self, path: Path) -> UserError:
        return UserError(
            f"there is no label map {path}. --token-label-data names the folder that holds "
            "CLASS/IMAGE.pt for every training image; make the missing maps, or drop "
            "--token-label-data to train every token on the image's class."
        )


def flipped(scores: Scores, ids: Ids, horizontal: bool, vertical: bool) -> tuple[Scores, Ids]:
    """Flip a map as its image is flipped."""
    turn = (slice(None), slice(None, None, -1 if vertical else 1), slice(None, None, -1 if horizontal else 1))
    return scores[turn], ids[turn]


def _unpacked(stored: object, path: Path) -> tuple[Scores, Ids]:
    if not isinstance(stored, torch.Tensor) or stored.ndim != 4 or len(stored) != 2 or stored.numel() == 0:
        found = list(stored.shape) if isinstance(stored, torch.Tensor) else type(stored).__name__
        raise UserError(
            f"the label map {path} holds {found}, not a tensor [2, k, height, width]. "
            "Make it again, or point --token-label-data at another folder."
        )
    logits, numbers = stored.float().numpy()  # (k, height, width) each
    with np.errstate(invalid="ignore"):  # what is no number becomes an integer unequal to it
        ids = numbers.astype(np.int32)
    if not np.isfinite(logits).all() or (ids < 0).any() or (ids != numbers).any():
        raise UserError(
            f"the label map {path} has values that are no logits or no class numbers. Make it again."
        )
    return logits.astype(np.float16), ids
