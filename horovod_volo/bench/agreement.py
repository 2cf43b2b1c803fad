"""Whether what is measured gives the right values: no speed is told of a wrong result."""

from __future__ import annotations

from torch import Tensor


class WrongResultError(RuntimeError):
    """Ours and the peer's values differ by more than rounding."""


def assert_agree(what: str, ours: Tensor, peer: Tensor, tolerance: float) -> None:
    """Raise unless the largest difference is within `tolerance` of the peer's largest value."""
    scale = float(peer.detach().abs().max())
    difference = float((ours.detach() - peer.detach()).abs().max())
    if not difference <= tolerance * scale:  # so written, NaN is a difference
        raise WrongResultError(
            f"{what}: ours and the peer's differ by {difference:.3g}, where the largest value is {scale:.3g} "
            f"and {tolerance:g} of it is allowed. Nothing was measured."
        )
