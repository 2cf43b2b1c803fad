"""Loads a trained model for evaluation from a run, a checkpoint, a file of weights, or timm.

Evaluation adds half of the highest token logit to each class logit. An auxiliary head that no loss has
trained would add noise, so evaluation leaves it out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from horovod_volo.config.recipe import load_recipe
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model, check_model, our_name, spec_of
from horovod_volo.models.registry import ModelSpec, registered_model
from horovod_volo.models.timm_api import is_model
from horovod_volo.models.weights import AUX_HEAD, TIMM, load_weights, read_weights, weights_file
from horovod_volo.models.weights_header import read_class_names, read_evaluation, statistics_of_weights

SETTINGS_OF_RUN = "resolved.toml"

AuxHead = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class PretrainedModel:
    """A trained model, on the CPU, in evaluation mode."""

    network: nn.Module
    name: str
    image_side: int
    num_classes: int
    crop_pct: float
    mean: tuple[float, ...]  # of training pixels from 0 to 1
    std: tuple[float, ...]
    interpolation: str
    messages: list[str]
    class_names: tuple[str, ...] = ()  # in the order of the logits; none if the weights do not have them
    crop_mode: str = "center"  # as of ModelSpec
    model_kwargs: str = ""  # of its run

    @property
    def has_aux_head(self) -> bool:
        """Return whether evaluation adds token logits to the class logits."""
        return getattr(self.network, "aux_head", None) is not None


def load_pretrained(
    source: str,
    *,
    name: str = "",
    image_side: int = 0,
    use_ema: bool = False,
    aux_head: AuxHead = "auto",
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> PretrainedModel:
    """Build a model and load the weights at `source`: a run, a checkpoint, a file or timm:NAME.

    `name` is the model, if the source does not record it; `image_side` 0: the image size it was trained at.
    `use_ema` loads the averaged weights (EMA); `aux_head` chooses whether evaluation adds the token logits.
    `mean` and `std` are those of training pixels, for weights that do not record them.
    """
    if not source.startswith(TIMM):
        weights_file(Path(source))  # a missing path is the first error
    run = settings_of_run(source)
    if run.get("task", "classification") != "classification":
        raise UserError(f"{source} is a network for {run['task']}, which this command does not know.")
    name = name or str(run.get("model", "")) or (source.removeprefix(TIMM) if source.startswith(TIMM) else "")
    if not name:
        raise UserError(
            f"There is no {SETTINGS_OF_RUN} that names the model of the weights in {source}. Add --model."
        )
    if (plugin := run.get("plugin", "")) and registered_model(name) is None and not is_model(name):
        raise UserError(f"{source} was trained with the model {name} of a plugin. Add --plugin {plugin}.")
    published = spec_of(name)
    side = image_side or int(run.get("img_size", 0)) or published.img_size
    crop_mode, crop_pct = _crop(source, run, published, side)
    if crop_mode not in ("center", "squash"):
        raise UserError(f"timm evaluates {name} with crop_mode {crop_mode}, which is missing here. Use timm.")
    name = our_name(name)
    check_model(name, img_size=side, tokens=False)
    statistics = statistics_of_weights(source, name, run, mean, std)
    state, messages = read_weights(source, use_ema=use_ema)
    without = reason_to_leave_out(state, run, aux_head, source) if spec_of(name).stride else ""
    if without:
        state = {key: tensor for key, tensor in state.items() if not key.startswith(AUX_HEAD)}
        messages.append(f"evaluated by the class token alone: {without}")
    classes, kwargs = _classes(name, state, source), str(run.get("model_kwargs", ""))
    sizes: dict[str, Any] = {"img_size": side, "num_classes": classes, "drop_path": 0.0}
    network = build_model(name, **sizes, aux_head=not without, model_kwargs=kwargs)
    messages += load_weights(network, name, state, source)
    network.eval().requires_grad_(False)
    pixels, names = (*statistics, published.interpolation), read_class_names(source)
    return PretrainedModel(
        network, name, side, classes, crop_pct, *pixels, messages, names, crop_mode, kwargs
    )


def _crop(source: str, run: Mapping[str, Any], published: ModelSpec, side: int) -> tuple[str, float]:
    """Return crop_mode and crop_pct of the run, else those recorded with the weights, else timm's."""
    if run:  # runs are evaluated on centre crops
        return "center", float(run.get("crop_pct", 0.0)) or published.crop_at(side)
    try:
        found = read_evaluation(source)
        of_test = found.get("test_crop_pct") if (found.get("test_input_size") or [side])[-1] == side else 0
        return str(found["crop_mode"]), float(of_test or found["crop_pct"])
    except (ValueError, KeyError, TypeError):  # of timm:NAME, for one
        return published.crop_mode, published.crop_at(side)


def reason_to_leave_out(
    tensors: Mapping[str, Tensor], run: Mapping[str, Any], choice: AuxHead, source: str
) -> str:
    """Return why evaluation leaves the auxiliary head out, or an empty string if it does not.

    `run` holds the settings of the weights' run, as far as they are known.
    """
    if not any(name.startswith(AUX_HEAD) for name in tensors):
        if choice == "on":
            raise UserError(f"The weights in {source} have no auxiliary head. Drop --aux-head on.")
        return "the weights have no auxiliary head"
    if choice != "auto":
        return "" if choice == "on" else "--aux-head off"
    if run.get("token_label") is False or run.get("dense_weight") == 0:
        return "the run did not train the auxiliary head"
    # The published code, timm and this code initialize biases to 0. One training step changes them, as no
    # softmax is exactly 0; without a gradient they stay 0, also under weight decay.
    bias = tensors.get(f"{AUX_HEAD}bias")
    if bias is not None and not bias.any():
        return "the auxiliary head was never trained, its biases are all 0"
    return ""


def task_of(source: str) -> str:
    """Return the task of the run that weights are in."""
    return str(settings_of_run(source).get("task", "classification"))


def settings_of_run(source: str) -> Mapping[str, Any]:
    """Return the settings of the run that the weights are in, or nothing if they are in none."""
    path = Path(source)
    if source.startswith(TIMM) or not path.exists():
        return {}
    path = path.resolve()
    for above in (path, *list(path.parents)[:3]):  # RUN/checkpoints/STEP/FILE
        if (above / SETTINGS_OF_RUN).is_file():
            return load_recipe(str(above / SETTINGS_OF_RUN))
    return {}


def _classes(name: str, state: Mapping[str, Tensor], source: str) -> int:
    for head in spec_of(name).heads:
        for key in (f"{head}.bias", f"{head}.weight"):
            if key in state and state[key].dim():
                return len(state[key])
    raise UserError(f"The weights in {source} have no head of {name}. Check --model.")
