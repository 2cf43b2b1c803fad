"""timm: its models and their metadata. The only importer of timm, except benchmarks that compare with it.

timm imports torchvision. With a CPU-only torch, torchvision cannot load its compiled operators, and its
import fails because two operators are not declared. Declaring them makes the Python part importable, which
is all timm needs. To be removed when torchvision imports without its operators.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest

try:
    import torchvision  # noqa: F401
except RuntimeError:  # "operator torchvision::nms does not exist"
    for _name in ("nms", "qnms"):
        _signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_name}", _signature)

import huggingface_hub as hub
from timm import create_model, get_pretrained_cfg, is_model, list_models
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm2d, resample_abs_pos_embed, resample_abs_pos_embed_nhwc
from timm.models import group_parameters
from timm.models.volo import VOLO

# Imported from here by other modules.
__all__ = ["IMAGENET_DEFAULT_MEAN", "IMAGENET_DEFAULT_STD", "VOLO", "LayerNorm2d", "create_model"]
__all__ += ["get_pretrained_cfg", "group_parameters", "is_model", "list_models"]
__all__ += ["resample_abs_pos_embed", "resample_abs_pos_embed_nhwc"]


def allow_posterize_to_no_bits() -> None:
    """Make timm's RandAugment work with Pillow 11 and newer, which refuses to posterize to 0 bits.

    timm does so at the maximum magnitude. To be removed when timm keeps at least one bit.
    """
    from timm.data.auto_augment import NAME_TO_OP, posterize

    def keep_bits(image: Any, bits: int, **others: Any) -> Any:
        return posterize(image, bits, **others) if bits else image.point([0] * 256 * len(image.getbands()))

    NAME_TO_OP["PosterizeIncreasing"] = keep_bits


def adapted_by_timm(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Bring weights of another timm release or image size into the form of one of timm's models."""
    given = dict(state)
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    shapes = {key: tensor.shape for key, tensor in given.items()}
    if adapt is None or shapes == {key: tensor.shape for key, tensor in model.state_dict().items()}:
        return given, []
    return dict(adapt(given, model)), []


def imagenet_classes(name: str) -> tuple[str, ...]:
    """Return ImageNet's names (n01440764, ...) of the classes of timm's weights; none for other classes."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(get_pretrained_cfg(name).to_dict()) if is_model(name) else None
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()


def described(names: Sequence[str]) -> list[str]:
    """Return names with what ImageNet's mean, such as "n01440764 tench, Tinca tinca"."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    known = set(info.label_names())
    return [f"{name} {info.label_name_to_description(name)}" if name in known else name for name in names]


def why_missing(name: str) -> str:
    """Return why the weights that timm publishes are neither in the cache nor on the hub; empty: they are.

    The request is not repeated, so that an offline machine waits for seconds.
    """
    repository, file = str(get_pretrained_cfg(name).hf_hub_id), "model.safetensors"
    if isinstance(hub.try_to_load_from_cache(repository, file), str):
        return ""
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(repository, file), timeout=5.0)
    except Exception as error:  # the hub's HTTP client has other exceptions in other releases
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return ""


def downloaded_weights(name: str) -> dict[str, Tensor]:
    """Return the weights that timm publishes under a name, from its cache or the network."""
    if not is_model(name):
        hint = nearest(name.split(".")[0], list_models())
        raise UserError(f"timm has no model {name!r}.{hint}")
    try:
        model: nn.Module = create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"timm has no weights of {name} in its cache and cannot fetch them "
            f"({' '.join(str(error).split())[:300]}). Copy a file of weights here and name that."
        ) from None
    return model.state_dict()
