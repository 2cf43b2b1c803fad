"""The one place where timm's networks come in.

timm imports torchvision. Beside a CPU-only torch, torchvision's compiled operators cannot load
and its import fails for want of two names it registers fakes for; declaring them lets the
Python part in, which is all timm needs. To be removed when torchvision has a CPU build on the
package index, or imports without its operators.
"""

from __future__ import annotations

import torch


def _declare_missing_operators() -> None:
    for name, signature in (
        ("nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        ("qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
    ):
        torch.library.define(f"torchvision::{name}", signature)


try:
    import torchvision  # noqa: F401
except RuntimeError:  # "operator torchvision::nms does not exist"
    _declare_missing_operators()

from timm.models.volo import VOLO  # noqa: E402

__all__ = ["VOLO"]
