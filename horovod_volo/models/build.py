"""Builds a model by name: a registered one, or any classification model of timm."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from horovod_volo.config.setting import keyword_arguments
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest
from horovod_volo.models import timm_api
from horovod_volo.models.registry import MODELS, ModelSpec, TokenModel, registered_model
from horovod_volo.models.volo import TokenSwap  # this registers VOLO

_IMAGE_CHANNELS = 3
_BACKBONE = "backbone"  # of --freeze

# (images, swap_tokens, drop_path_seed of 64 bits) -> class logits (batch, classes), token logits (batch,
# tokens, classes); the latter are empty for a model without them.
Forward = Callable[[Tensor, TokenSwap, int], tuple[Tensor, Tensor]]


def spec_of(name: str) -> ModelSpec:
    """Return the spec of a registered model, or of one of timm's."""
    spec = registered_model(name)
    if spec is not None:
        return spec
    if timm_api.is_model(name):
        return _timm_spec(name)
    ours = MODELS.names()
    raise UserError(
        f"There is no model {name!r}.{nearest(name, [*ours, *timm_api.list_models()])} Models: "
        f"{', '.join(ours)}, and timm's. A model of your own needs --plugin."
    )


def check_model(name: str, *, img_size: int, tokens: bool) -> None:
    """Raise UserError if there is no such model and image size or, with `tokens`, no token logits."""
    spec = spec_of(name)
    if spec.stride and img_size % spec.stride:
        nearest_size = max(2, round(img_size / spec.stride)) * spec.stride
        raise UserError(
            f"--img-size must be a multiple of {spec.stride} for {name}, not {img_size}. "
            f"The nearest is {nearest_size}."
        )
    if tokens and not spec.stride:
        raise UserError(f"{name} gives no token logits. {_with_tokens(name)}")


def _with_tokens(name: str) -> str:
    own = our_name(name)
    if own != name:
        return f"Use --model {own}, which has the same parameters and gives them."
    with_tokens = [other for other in MODELS.names() if spec_of(other).stride]
    return f"Add --no-token-label --no-mix-token, or use one of {', '.join(with_tokens)}."


def tokens_per_side(name: str, img_size: int) -> int:
    """Return the number of tokens along an image's side; 0: the model has no token logits."""
    stride = spec_of(name).stride
    return img_size // stride if stride else 0


def build_model(
    name: str,
    *,
    img_size: int,
    num_classes: int,
    drop_path: float,
    grad_checkpoint: bool = False,
    aux_head: bool = True,
    model_kwargs: str = "",
    head_init_scale: float = 1.0,
) -> nn.Module:
    """Build a model with fresh weights from torch's random state, on torch's default device.

    `aux_head` gives a model with tokens the auxiliary head for its token logits. The rest are flags.
    """
    check_model(name, img_size=img_size, tokens=False)
    spec = spec_of(name)
    sizes = {"img_size": img_size, "num_classes": num_classes, "drop_path": drop_path}
    arguments = {**spec.arguments, **keyword_arguments(model_kwargs)}
    try:
        model = spec.build(**sizes, aux_head=aux_head, **arguments)
    except (TypeError, ValueError, IndexError, AssertionError) as error:
        if not model_kwargs:
            raise
        raise UserError(f"--model-kwargs {model_kwargs} does not fit {name}: {error}.") from None
    for key, parameter in model.named_parameters() if head_init_scale != 1.0 else ():
        if key.startswith(tuple(f"{head}." for head in spec.heads)):
            parameter.data.mul_(head_init_scale)
    if grad_checkpoint:
        try:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AttributeError, AssertionError):
            raise UserError(f"{name} has no activation checkpointing. Drop --grad-checkpoint.") from None
    return model


def _timm_spec(name: str) -> ModelSpec:
    published = timm_api.get_pretrained_cfg(name)
    build = partial(_build_timm, name)
    if published is None:
        return ModelSpec(name, build, heads=("head", "aux_head"))
    classifier = published.classifier
    return ModelSpec(
        name,
        build,
        heads=classifier if isinstance(classifier, tuple) else (classifier,),
        img_size=(published.test_input_size or published.input_size)[-1],
        crop_pct=published.test_crop_pct or published.crop_pct,
        other_crop_pct=published.crop_pct,
        crop_mode=published.crop_mode,
        mean=published.mean,
        std=published.std,
        interpolation="bilinear" if published.interpolation == "bilinear" else "bicubic",
        adapt_weights=timm_api.adapted_by_timm,
    )


def _build_timm(
    name: str,
    *,
    img_size: int,
    num_classes: int,
    drop_path: float,
    aux_head: bool,  # noqa: ARG001
    **arguments: Any,
) -> nn.Module:
    settings: dict[str, Any] = {"num_classes": num_classes}
    published = timm_api.get_pretrained_cfg(name)
    if published is not None and published.fixed_input_size:  # other constructors take no image size
        settings["img_size"] = img_size
    if drop_path:
        settings["drop_path_rate"] = drop_path
    try:
        model: nn.Module = timm_api.create_model(name, **settings | arguments)
    except TypeError as error:  # a timm constructor names the argument that it does not take
        raise UserError(f"timm does not build {name} with these settings: {error}.") from None
    except AssertionError as error:
        raise UserError(f"{name} does not take --img-size {img_size}: {error}.") from None
    return model


def linear_head(network: nn.Module, heads: Collection[str]) -> nn.Linear:
    """Return the only layer that computes logits; raise UserError unless it is linear."""
    found = [module for name, module in network.named_modules() if name in heads]
    if len(found) == 1 and isinstance(found[0], nn.Linear) and found[0].bias is not None:
        return found[0]
    raise UserError(
        "--fit-head is for networks with one linear classifier, and for class labels. Add --no-token-label, "
        "use another --model, or --no-fit-head."
    )


def training_forward(model: nn.Module) -> Forward:
    """Return the forward pass for training; without an auxiliary head there are no token logits."""
    if isinstance(model, TokenModel):
        return model.class_logits if getattr(model, "aux_head", None) is None else model.training_logits
    return partial(_class_logits, model)


def _class_logits(
    model: nn.Module,
    images: Tensor,
    swap_tokens: TokenSwap,  # noqa: ARG001
    drop_path_seed: int,
) -> tuple[Tensor, Tensor]:
    # timm's networks draw from torch's generator, which takes 63 bits.
    seed_torch(images.device, drop_path_seed >> 1)
    logits: Tensor = model(images)
    return logits, logits.new_empty(len(logits), 0, logits.shape[-1])


def seed_torch(device: torch.device, seed: int) -> None:
    """Seed torch's generator of a device, for what draws from it."""
    # torch.manual_seed() also formats the whole call stack for devices that are not there, which takes longer
    # than everything else that a step does in Python.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Return the names of parameters that the model exempts from weight decay."""
    exempt = getattr(model, "no_weight_decay", None)
    return set(exempt()) if callable(exempt) else set()


def hidden_matrices(model: nn.Module, heads: Collection[str]) -> set[str]:
    """Return the names of the weights that map features to features.

    They are those of linear layers and of convolutions over all channels. Those of `heads`, which compute
    logits, are not hidden, nor are filters over the three channels of an image.
    """
    prefixes = tuple(f"{head}." for head in heads)
    found = set()
    for name, module in model.named_modules():
        is_filter = isinstance(module, _ConvNd) and module.groups == 1 and not module.transposed
        if not (is_filter or isinstance(module, nn.Linear)) or f"{name}.".startswith(prefixes):
            continue
        weight = module.weight
        reads_image = is_filter and module.in_channels == _IMAGE_CHANNELS
        if not reads_image and min(len(weight), weight[0].numel()) > 1:
            found.add(f"{name}.weight")
    return found


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the layer number of each parameter, from the stem up to the heads, as timm counts."""
    match = getattr(model, "group_matcher", None)
    if not callable(match):
        raise UserError(f"{type(model).__name__} has no group_matcher to number layers. Add --layer-decay 1.")
    numbers: dict[str, int] = timm_api.group_parameters(model, match(coarse=False), reverse=True)
    return numbers


def our_name(name: str) -> str:
    """Return our name of a timm model that is registered here too, or the name unchanged."""
    own = name.split(".")[0].rsplit("_", 1)[0]  # timm's: MODEL_SIZE.WEIGHTS
    return own if registered_model(own) else name


def freeze(network: nn.Module, parts: str, heads: Collection[str]) -> None:
    """Freeze the parts of a network that --freeze lists, separated by commas.

    A part is "backbone", all but the `heads` that compute logits, or a prefix of parameter names.
    """
    parameters = dict(network.named_parameters())
    prefixes = tuple(f"{head}." for head in heads)
    frozen = set[str]()
    for part in filter(None, map(str.strip, parts.split(","))):
        if part == _BACKBONE and not hasattr(network, _BACKBONE):  # otherwise it is a prefix
            found = {name for name in parameters if not name.startswith(prefixes)}
        else:
            found = {name for name in parameters if name.startswith(part)}
        if not found:
            words = [_BACKBONE, *dict.fromkeys(name.split(".")[0] for name in parameters)]
            raise UserError(
                f"--freeze {part}: no parameter has a name that begins so.{nearest(part, words)} It takes "
                f"{_BACKBONE}, or prefixes such as {', '.join(words[1:5])}."
            )
        frozen |= found
    if frozen == parameters.keys():
        raise UserError(f"--freeze {parts} leaves no parameter to train. Freeze less.")
    for name in frozen:
        parameters[name].requires_grad_(False)


def start_training(network: nn.Module) -> None:
    """Switch to training, except for batch norm that is frozen."""
    network.train()
    for module in network.modules():
        if isinstance(module, _BatchNorm) and {each.requires_grad for each in module.parameters()} == {False}:
            module.eval()
