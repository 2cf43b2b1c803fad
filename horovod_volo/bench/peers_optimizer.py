"""timm's update: clip, AdamW, averaged weights. By its defaults, and with the fastest of its own choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision

# isort: split
import timm.optim
import timm.utils
from torch import Tensor, nn


class TimmUpdate:
    """Takes steps of a model that has gradients; nobody zeroes them, which timm leaves to backward."""

    def __init__(
        self, model: nn.Module, average: Any, *, rate: float, decay: float, bound: float, **choices: bool
    ) -> None:
        self._model, self._average, self._bound = model, average, bound
        self._optimizer = timm.optim.create_optimizer_v2(
            model, opt="adamw", lr=rate, weight_decay=decay, **choices
        )

    def __call__(self) -> None:
        """Take one step."""
        timm.utils.dispatch_clip_grad(list(self._model.parameters()), self._bound, mode="norm")
        self._optimizer.step()
        self._average.update(self._model)

    def averages(self) -> Iterable[Tensor]:
        """Return the averaged weights."""
        averages: Iterable[Tensor] = self._average.module.parameters()
        return averages


def by_default(model: nn.Module, *, rate: float, decay: float, bound: float, kept: float) -> TimmUpdate:
    """Build AdamW as timm does unless told otherwise, and ModelEmaV2."""
    average = timm.utils.ModelEmaV2(model, decay=kept)
    return TimmUpdate(model, average, rate=rate, decay=decay, bound=bound)


def at_its_best(model: nn.Module, *, rate: float, decay: float, bound: float, kept: float) -> TimmUpdate:
    """Build torch's fused AdamW, and ModelEmaV3, which goes through all tensors at once."""
    average = timm.utils.ModelEmaV3(model, decay=kept, foreach=True)
    return TimmUpdate(model, average, rate=rate, decay=decay, bound=bound, fused=True)
