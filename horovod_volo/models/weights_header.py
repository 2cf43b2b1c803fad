"""What is known of weights besides their tensors: the names of the classes, in the order of the logits, and
the mean and standard deviation of pixels with which the network is trained and used.

They are in the header of the safetensors files of checkpoints and exports, beside the crop of evaluation, so
they travel with the weights. Statistics are the model's own, unless the settings of its run say otherwise.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from horovod_volo.config.data_settings import Data
from horovod_volo.config.validation import check_statistics
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import spec_of
from horovod_volo.models.timm_api import imagenet_classes
from horovod_volo.models.weights import TIMM, weights_file

_CLASSES, _MEAN, _STD = "classes", "mean", "std"


class PixelStatistics(NamedTuple):
    """Mean and standard deviation of each channel, for pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def describe(self) -> str:
        """Return them as flags."""
        mean, std = (" ".join(map(repr, values)) for values in self)
        return f"--mean {mean} --std {std}"


def statistics_of_run(settings: Data, model: str) -> PixelStatistics:
    """Return the statistics that a run uses: its settings', else its model's."""
    spec = spec_of(model)
    return PixelStatistics(settings.mean or spec.mean, settings.std or spec.std)


def statistics_of_weights(
    source: str, model: str, run: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> PixelStatistics:
    """Return the statistics that weights were trained with; raise UserError if a flag contradicts them.

    `run` are the settings of the run that the weights are in, if any; `mean` and `std` are those of flags, or
    empty.
    """
    check_statistics(mean, std)
    own = read_statistics(source)
    if own is None and (run.get(_MEAN) or run.get(_STD)):
        mean_of_run, std_of_run = (tuple(run.get(key, ())) for key in (_MEAN, _STD))  # lists in TOML
        own = statistics_of_run(Data(mean=mean_of_run, std=std_of_run), model)
    if own is None:
        return statistics_of_run(Data(mean=mean, std=std), model)
    if PixelStatistics(mean or own.mean, std or own.std) != own:
        raise UserError(f"{source} was trained with {own.describe()}. Drop these flags, or give the same.")
    return own


def read_statistics(source: str) -> PixelStatistics | None:
    """Return the statistics that are with the weights at `source`, or None if they hold none."""
    found = read_evaluation(source)
    try:
        return PixelStatistics(*(tuple(map(float, found[key])) for key in (_MEAN, _STD)))
    except (KeyError, ValueError, TypeError):
        return None


def read_evaluation(source: str) -> Mapping[str, Any]:
    """Return the crop and statistics in the header of the weights at `source`, else in timm's config.json."""
    found, header = dict[str, Any](), read_header(source)
    with suppress(UserError, OSError, ValueError, KeyError, TypeError, RecursionError):
        config = weights_file(Path(source)).with_name("config.json").read_bytes()
        found |= json.loads(config)["pretrained_cfg"]
    with suppress(ValueError, KeyError):
        found |= header | {key: json.loads(header[key]) for key in (_MEAN, _STD)}
    return found


def finetune_warnings(source: str, settings: Data, model: str) -> list[str]:
    """Return a warning if weights to start from were trained with other statistics than a run uses."""
    before, now = read_statistics(source), statistics_of_run(settings, model)
    if before is None or before == now:
        return []
    return [f"the weights in {source} were trained with {before.describe()}, this run uses {now.describe()}"]


def header_of(
    names: Sequence[str],
    statistics: PixelStatistics | None = None,
    crop_mode: str = "center",
    crop_pct: float = 0.0,
) -> dict[str, str]:
    """Return the header of a safetensors file of a network with these classes, statistics and crop."""
    header = {"format": "pt"} | ({_CLASSES: json.dumps(list(names))} if names else {})
    if statistics:
        header |= {_MEAN: json.dumps(statistics.mean), _STD: json.dumps(statistics.std)}
        header |= {"crop_mode": crop_mode, "crop_pct": str(crop_pct)}
    return header


def read_class_names(source: str) -> tuple[str, ...]:
    """Return the names that are with the weights at `source`; none, if they are of an earlier version."""
    if source.startswith(TIMM):
        return imagenet_classes(source.removeprefix(TIMM))
    try:
        names = json.loads(read_header(source).get(_CLASSES, "[]"))
    except ValueError:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def read_header(source: str) -> dict[str, str]:
    """Return the header of the safetensors file at `source`; nothing, if there is no such file."""
    if source.startswith(TIMM):
        return {}
    file = weights_file(Path(source))
    if file.suffix != ".safetensors":
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError):
        return {}  # reading the weights explains what is wrong
