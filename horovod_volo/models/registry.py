"""The registry of models: what the trainer must know of each, by name.

A family of models is one file that ends with `register_model`, and its names in core/names.py. A plugin calls
`register_model` in its own module. A name that is not registered is one of timm's (models/build.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from horovod_volo.core.names import Registry
from horovod_volo.models.timm_api import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

State = Mapping[str, Tensor]

# (model, weights, perhaps for another image size) -> weights that fit the model, messages on what was changed
AdaptWeights = Callable[[nn.Module, State], tuple[dict[str, Tensor], list[str]]]


# (img_size=, num_classes=, drop_path=, aux_head=, and `arguments`) -> a model with fresh weights; `aux_head`
# asks for token logits, of a model that has a `stride`.
BuildModel = Callable[..., nn.Module]


@runtime_checkable
class TokenModel(Protocol):
    """A model with a grid of tokens, which MixToken swaps and the attribute `aux_head` classifies."""

    training_logits: Callable[..., tuple[Tensor, Tensor]]  # a Forward (models/build.py) of both heads
    class_logits: Callable[..., tuple[Tensor, Tensor]]  # a Forward without token logits


def unchanged(model: nn.Module, state: State) -> tuple[dict[str, Tensor], list[str]]:  # noqa: ARG001
    """Return weights as they are."""
    return dict(state), []


@dataclass(frozen=True)
class ModelSpec:
    """One model by its name; image statistics are those that published weights were trained with."""

    name: str
    build: BuildModel
    stride: int = 0  # pixels per token side, for a TokenModel; 0: no token logits, and any image size
    heads: tuple[str, ...] = ("head",)  # the modules that give logits
    img_size: int = 224  # of images that published weights expect
    crop_pct: float = 0.96  # side of the evaluation crop over side of the resized image, at `img_size`
    other_crop_pct: float = 0.0  # at other sizes; 0: the same
    crop_mode: str = "center"  # timm's; "squash": images are resized to a square before the crop
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN  # of pixels from 0 to 1
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    interpolation: str = "bicubic"  # of resizing for evaluation: "bicubic" or "bilinear"
    adapt_weights: AdaptWeights = unchanged
    timm_name: str = ""  # of the architecture, for exports, if timm has it
    timm_class: Callable[..., nn.Module] | None = None  # timm's class of the same network
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of `build` and `timm_class`, such as layers

    def crop_at(self, img_size: int) -> float:
        return self.crop_pct if img_size == self.img_size else self.other_crop_pct or self.crop_pct


class NormsOverRanks(NamedTuple):
    """Batch norm over the images of all ranks (models/sync_batch_norm.py)."""

    synchronize: Callable[[nn.Module], None]  # makes a network's batch norms such layers
    connect: Callable[[nn.Module, Any], int]  # lets them exchange with other ranks


MODELS: Registry[ModelSpec] = Registry("model", "--model")
NORMS_OVER_RANKS: Registry[NormsOverRanks] = Registry("batch norm over ranks", "--sync-bn")


def register_model(spec: ModelSpec) -> None:
    """Make a model available under its name."""
    MODELS.register(spec.name, spec)


def registered_model(name: str) -> ModelSpec | None:
    """Return what was registered under a name."""
    return MODELS.find(name) if name in MODELS.names() else None
