"""The small tensors that ranks average at every step besides gradients, in one message.

They are the batch-norm statistics, the maxima of gradient buckets, checksums of the step's samples, and flags
by which all ranks learn at the same step that one of them was asked to stop, that hosts have come or go, or
that its loss or a gradient is not finite. A single rank on a GPU has nothing to agree on, and does not wait
for the device to look.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.world import World

CHECKSUM_BITS = 12
# fp32 holds the mean of such numbers over 65,536 ranks so exactly that rounding gives back their sum.
_NOTE_BITS = CHECKSUM_BITS // 2
_STOP, _HOSTS, _LOSS, _CHECKSUMS = 0, 1, 2, slice(3, 7)  # upper and lower half of each checksum
_NOTES = 7


class StepStatistics:
    """Averages tensors over ranks in place, and agrees on flags. Shapes are equal on all ranks."""

    def __init__(self, moving: Sequence[Tensor], maxima: Tensor, world: World) -> None:
        """Move the batch-norm statistics and the maxima, floats on one device, into one flat tensor."""
        self.stop_agreed = False  # the same on all ranks, after each exchange
        self.hosts_changed = False  # likewise: whether the ranks are to be formed again
        self.finite = True  # likewise: whether all losses and tensors of the step are
        self.checksums = (0, 0)  # likewise: sums over ranks of what `note_samples` was given
        self._world = world
        self._notes, self.maxima = maxima.new_zeros(_NOTES), maxima
        self._asked = self._hosts_noted = False
        self._averaged = _flatten_in_place([*moving, self.maxima, self._notes])
        self._before, self._own = self._averaged.clone(), self._averaged.clone()
        self.looks = world.size > 1 or self._averaged.device.type == "cpu"

    def ask_to_stop(self) -> None:
        """Let all ranks agree to stop in the next exchange."""
        self._asked = True
        self._notes[_STOP].fill_(1.0)

    def note_changed_hosts(self) -> None:
        """Let all ranks agree in the next exchange that they must be formed again."""
        self._hosts_noted = True
        self._notes[_HOSTS].fill_(1.0)

    def note_samples(self, checksums: tuple[int, int]) -> None:
        """Note two checksums of CHECKSUM_BITS bits of this rank's samples of the step."""
        self.checksums = checksums
        if self._world.size > 1:
            halves = [half for checksum in checksums for half in divmod(checksum, 1 << _NOTE_BITS)]
            for note, half in zip(self._notes[_CHECKSUMS], halves, strict=True):
                note.fill_(half)

    def add_loss(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch."""
        if self.looks:
            self._notes[_LOSS].add_(loss.detach() * 0.0)  # 0, or nan

    def average_async(self) -> Wait:
        """Start the exchange; return the function that waits for it. Collective: every rank calls this."""
        self._own.copy_(self._averaged)
        scale = 1.0 / self._world.size
        wait = self._world.collectives.allreduce_async(self._averaged, "statistics", scale)

        def wait_and_agree() -> None:
            wait()
            self._agree()

        return wait_and_agree

    def own_fault(self) -> str:
        """Return what this rank had in the last step that is not finite, or nothing. Waits for the device."""
        moving, maxima, notes = self._own.tensor_split((-_NOTES - len(self.maxima), -_NOTES))
        parts = {"its loss is": notes, "its gradients are": maxima, "its batch-norm statistics are": moving}
        return next((name for name, part in parts.items() if not part.isfinite().all()), "")

    def complete_step(self) -> None:
        """Keep the averages of the step, or drop them if they are not finite: they would stay so for ever."""
        if self.finite:
            self._before.copy_(self._averaged)
        else:
            self.restore()

    def restore(self) -> None:
        """Set the tensors to what they were after the last step."""
        self._averaged.copy_(self._before)

    def update_after_restore(self) -> None:
        """Note that the tensors were overwritten from a checkpoint."""
        self._before.copy_(self._averaged)

    def _agree(self) -> None:
        if not self.looks:
            self.stop_agreed, self.hosts_changed = self._asked, self._hosts_noted
            return
        *notes, finite = torch.cat([self._notes, self._averaged.isfinite().all().view(1)]).tolist()
        self.stop_agreed, self.hosts_changed = notes[_STOP] > 0, notes[_HOSTS] > 0
        self.finite = bool(finite)
        if self._world.size > 1:
            first, low_first, second, low_second = (
                round(mean * self._world.size) for mean in notes[_CHECKSUMS]
            )
            self.checksums = ((first << _NOTE_BITS) + low_first, (second << _NOTE_BITS) + low_second)


def _flatten_in_place(tensors: list[Tensor]) -> Tensor:
    """Return one flat tensor of which the given tensors become views."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    offset = 0
    for tensor in tensors:
        tensor.data = flat[offset : offset + tensor.numel()].view_as(tensor)
        offset += tensor.numel()
    return flat
