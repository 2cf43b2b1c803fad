"""Frozen parameters: those that keep the weights they begin with.

They need no gradient, so nothing of them is computed in backward, exchanged, updated or decayed. Batch norm
whose parameters are frozen uses its running statistics, as in evaluation, and does not move them.
Invariant: which parameters are frozen follows from the settings and the network, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest
from horovod_volo.models.build import layer_numbers

_BACKBONE, _STEM, _BLOCKS = "backbone", "stem", "blocks:"


def freeze(network: nn.Module, parts: str, heads: Collection[str]) -> None:
    """Freeze the parts of a network that --freeze lists, separated by commas; `heads` compute its logits."""
    frozen = {
        name for part in filter(None, parts.split(",")) for name in _names(network, part.strip(), heads)
    }
    parameters = dict(network.named_parameters())
    if frozen == parameters.keys():
        raise UserError(f"--freeze {parts} leaves no parameter to train. Freeze less.")
    for name in frozen:
        parameters[name].requires_grad_(False)


def start_training(network: nn.Module) -> None:
    """Switch to training, except for batch norm that is frozen."""
    network.train()
    for module in network.modules():
        if isinstance(module, _BatchNorm) and _is_frozen(module):
            module.eval()


def _is_frozen(norm: _BatchNorm) -> bool:
    own = list(norm.parameters())
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def _names(network: nn.Module, part: str, heads: Collection[str]) -> set[str]:
    """Return the names of a part's parameters: a part by its word, or a prefix of their names."""
    names = [name for name, _ in network.named_parameters()]
    if part == _BACKBONE and not hasattr(network, _BACKBONE):  # otherwise it is a prefix
        prefixes = tuple(f"{head}." for head in heads)
        return {name for name in names if not name.startswith(prefixes)}
    if part == _STEM or part.startswith(_BLOCKS):
        return _lowest_layers(network, part)
    found = {name for name in names if name.startswith(part)}
    if not found:
        words = [_BACKBONE, _STEM, *dict.fromkeys(name.split(".")[0] for name in names)]
        raise UserError(
            f"--freeze {part}: no parameter has a name that begins so.{nearest(part, words)} It takes "
            f"{_BACKBONE}, {_STEM}, {_BLOCKS}N, or prefixes such as {', '.join(words[2:6])}."
        )
    return found


def _lowest_layers(network: nn.Module, part: str) -> set[str]:
    """Return the parameters of the stem and, for blocks:N, of the N layers behind it."""
    numbers = layer_numbers(network)
    most = max(numbers.values()) - 1  # the last layer is that of the heads
    count = part.removeprefix(_BLOCKS)
    last = 0 if part == _STEM else int(count) if count.isdecimal() else -1
    if not 0 <= last <= most:
        raise UserError(
            f"--freeze {part}: give {_BLOCKS}N with N from 0, the stem alone, to {most}, all but the heads."
        )
    return {name for name, number in numbers.items() if number <= last}
