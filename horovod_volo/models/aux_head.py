"""Whether weights are evaluated with their auxiliary head, which gives the token logits.

Evaluation adds half of the highest token logit to each class logit. An auxiliary head that no loss has
trained would add noise, so evaluation leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from horovod_volo.core.errors import UserError

AUX_HEAD = "aux_head."  # prefix of its parameters' names in all published code

Choice = Literal["auto", "on", "off"]


def reason_to_leave_out(
    tensors: Mapping[str, Tensor], run: Mapping[str, Any], choice: Choice, source: str
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
