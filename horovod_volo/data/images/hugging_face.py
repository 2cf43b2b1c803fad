"""A data set of Hugging Face's `datasets` as samples: images as stored bytes, which are decoded here.

Only map-style data sets have the length and the positions that the order of an epoch needs.
"""

from __future__ import annotations

from typing import Any

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.split_folder import shortened

_LABEL_NAMES = ("label", "labels", "class", "target")
_IMAGE_NAMES = ("image", "img")


class HuggingFaceSamples:
    """The samples of a data set with a column of images and one of classes."""

    def __init__(self, dataset: Any) -> None:
        import datasets

        if isinstance(dataset, dict):
            raise UserError(
                f"this is a DatasetDict of {shortened(sorted(dataset))}, not one data set. Give one of them, "
                f"as train=dataset[{min(dataset)!r}]."
            )
        if not isinstance(dataset, datasets.Dataset):
            raise UserError(
                f"a {type(dataset).__name__} has no length and no positions, so it has no order to resume. "
                "Load it without streaming=True."
            )
        features = dataset.features
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        images = images or [name for name in _IMAGE_NAMES if name in features]
        labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        labels = labels or [name for name in _LABEL_NAMES if name in features]
        self._image, self._label = _one_of(images, "images", features), _one_of(labels, "classes", features)
        kind = features[self._label]
        if isinstance(kind, datasets.ClassLabel):
            self.classes: tuple[str, ...] = tuple(kind.names)
        if isinstance(features[self._image], datasets.Image):
            dataset = dataset.cast_column(self._image, datasets.Image(decode=False))
        self.targets = dataset.with_format(None).select_columns([self._label])[:][self._label]
        self._rows = dataset.with_format(None).select_columns([self._image])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return an image, as stored, and its class."""
        image = self._rows[index][self._image]
        if isinstance(image, dict):
            image = image["path"] if image["bytes"] is None else image["bytes"]
        return image, self.targets[index]


def is_hugging_face(dataset: object) -> bool:
    """Return whether a data set is of `datasets`, which is then installed."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__)


def _one_of(columns: list[str], what: str, features: Any) -> str:
    if len(columns) == 1:
        return columns[0]
    found = f"{len(columns)} columns of {what} ({', '.join(columns)})" if columns else f"no column of {what}"
    raise UserError(
        f"the data set has {found} among {', '.join(features)}. Keep one column of images and one of "
        "classes, with select_columns; rename_column can call it `label`."
    )
