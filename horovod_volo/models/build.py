"""A network from its name and size."""

from __future__ import annotations

from horovod_volo.config.errors import UserError
from horovod_volo.config.values import nearest
from horovod_volo.models.volo import SIZES, Volo

# Side of the evaluation crop over side of the resized image. Above 1 the crop is larger than the
# image and is filled up with black.
_CROP_PCT = {"volo_d4": 1.15, "volo_d5": 1.15, "volo_demo": 1.0}
_USUAL_CROP_PCT = 0.96


def check_model_name(name: str) -> None:
    """Raise UserError where no network has this name."""
    if name not in SIZES:
        raise UserError(f"There is no model {name!r}.{nearest(name, SIZES)} Models: {', '.join(SIZES)}.")


def build_model(name: str, *, img_size: int, num_classes: int, drop_path: float) -> Volo:
    """Build a network with fresh weights from torch's current random state, on torch's current device."""
    check_model_name(name)
    return Volo(img_size=img_size, num_classes=num_classes, drop_path_rate=drop_path, **SIZES[name])


def default_crop_pct(name: str) -> float:
    """Return the evaluation crop ratio published for the network."""
    return _CROP_PCT.get(name, _USUAL_CROP_PCT)
