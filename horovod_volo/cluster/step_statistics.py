"""The small tensors that ranks average at every step besides gradients, in one message.

They are the batch-norm statistics, the maxima of gradient buckets, and a flag by which all ranks learn at the
same step that one of them was asked to stop. On a GPU the host reads the flag one step later, so that it
never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.world import World


class StepStatistics:
    """Averages tensors over ranks in place, and agrees on stopping. Shapes are equal on all ranks."""

    def __init__(self, tensors: Sequence[Tensor], world: World) -> None:
        """Move the tensors, which are floats on one device, into one flat tensor."""
        self.stop_agreed = False  # the same on all ranks, after each exchange
        self._world = world
        self._stop = tensors[0].new_zeros(1)  # above 0 after an exchange: a rank was asked to stop
        self._asked = False
        self._averaged = _flatten_in_place([*tensors, self._stop])
        self._on_host = self._stop.new_zeros(1, device="cpu", pin_memory=self._stop.is_cuda)

    def ask_to_stop(self) -> None:
        """Let all ranks agree to stop in the next exchange."""
        if not self._asked:
            self._asked = True
            self._stop.fill_(1.0)

    def average_async(self) -> Wait:
        """Start the exchange; return the function that waits for it. Collective: every rank calls this."""
        scale = 1.0 / self._world.size
        wait = self._world.collectives.allreduce_async(self._averaged, "statistics", scale)

        def wait_and_agree() -> None:
            wait()
            self._agree()

        return wait_and_agree

    def _agree(self) -> None:
        if self._world.size == 1:
            self.stop_agreed = self._asked
        elif self._stop.is_cuda:
            # The copy of the step before is complete: this exchange came after it on the stream.
            self.stop_agreed = bool(self._on_host > 0)
            self._on_host.copy_(self._stop, non_blocking=True)
        else:
            self.stop_agreed = bool(self._stop > 0)


def _flatten_in_place(tensors: list[Tensor]) -> Tensor:
    """Return one flat tensor of which the given tensors become views."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    offset = 0
    for tensor in tensors:
        tensor.data = flat[offset : offset + tensor.numel()].view_as(tensor)
        offset += tensor.numel()
    return flat
