"""Whether weights are evaluated with their auxiliary head, which gives logits of the tokens, or without it.

Half the best token's logit is added to the class token's. Of a head that no loss has trained that is noise,
and the more of it the more classes there are: it is left out, and the class token decides alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from horovod_volo.core.errors import UserError

AUX_HEAD = "aux_head."  # how the names of its parameters begin, in all published code

Choice = Literal["auto", "on", "off"]


def reason_to_leave_out(
    tensors: Mapping[str, Tensor], run: Mapping[str, Any], choice: Choice, source: str
) -> str:
    """Return why the class token decides alone; nothing where the auxiliary head has its say.

    `run` holds the settings of the run that the weights are of, as far as they are known.
    """
    if not any(name.startswith(AUX_HEAD) for name in tensors):
        if choice == "on":
            raise UserError(f"The weights in {source} have no auxiliary head. Drop --aux-head on.")
        return "the weights have no auxiliary head"
    if choice != "auto":
        return "" if choice == "on" else "--aux-head off"
    if run.get("token_label") is False or run.get("dense_weight") == 0:
        return "the run did not train the auxiliary head"
    # The published code, timm and we begin with biases of 0. One step of training moves them, as softmax
    # gives no class exactly 0; without a gradient nothing does, and weight decay leaves 0 at 0.
    bias = tensors.get(f"{AUX_HEAD}bias")
    if bias is not None and not bias.any():
        return "the auxiliary head was never trained, its biases are all 0"
    return ""
