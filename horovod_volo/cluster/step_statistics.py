"""The small tensors that ranks average at every step besides gradients, in one message.

They are the batch-norm statistics, the maxima of gradient buckets, checksums of the step's samples, and flags
by which all ranks learn at the same step that one of them was asked to stop, that hosts have come or go, or
that its loss or a gradient is not finite. On a GPU the host need not wait for this: it reads what was agreed
one step later, and the device itself skips the update. A single rank on a GPU has nothing to agree on.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.world import World
from horovod_volo.core.rng import Purpose, bits_of_samples

CHECKSUM_BITS = 12
# fp32 holds the mean of such numbers over 65,536 ranks so exactly that rounding gives back their sum.
_NOTE_BITS = CHECKSUM_BITS // 2
_STOP, _HOSTS, _LOSS, _CHECKSUMS = 0, 1, 2, slice(3, 7)  # upper and lower half of each checksum
_NOTES = 7


def checksums(seed: int, epoch: int, samples: NDArray[Any], *, axis: int = -1) -> tuple[Any, Any]:
    """Return two checksums of CHECKSUM_BITS bits of a set of samples, whatever their order."""
    total = bits_of_samples(Purpose.LEDGER, seed, epoch, samples).sum(axis=axis, dtype=np.uint64)
    mask = np.uint64((1 << CHECKSUM_BITS) - 1)
    return total & mask, total >> np.uint64(CHECKSUM_BITS) & mask


class OwnStep(NamedTuple):
    """What this rank knows of a step."""

    step: int
    samples: Sequence[int] = ()
    checksums: tuple[int, int] = (0, 0)  # of the samples, of CHECKSUM_BITS bits each


class Outcome(NamedTuple):
    """What all ranks have agreed on in a step; the same on all, but for `own`."""

    own: OwnStep
    checksums: tuple[int, int]  # sums over ranks
    finite: bool = True  # whether all losses and tensors of the step are; otherwise it was skipped
    stop: bool = False  # whether a rank was asked to stop
    hosts_changed: bool = False  # whether the ranks are to be formed again
    fault: Callable[[], str] = str  # what this rank had that is not finite, or nothing. Waits for the device


class StepStatistics:
    """Averages tensors over ranks in place, and agrees on flags. Shapes are equal on all ranks."""

    def __init__(self, moving: Sequence[Tensor], maxima: Tensor, world: World) -> None:
        """Move the batch-norm statistics and the maxima, floats on one device, into one flat tensor."""
        self.finite = True  # whether all losses and tensors of the step are, as far as the host knows
        # Non-zero if not, for an optimizer that skips the step on the device; None: the host skips it.
        self.found_inf: Tensor | None = None
        self._world = world
        self._notes, self.maxima = maxima.new_zeros(_NOTES), maxima
        self._asked = self._hosts_noted = False
        self._averaged = _flatten_in_place([*moving, self.maxima, self._notes])
        self._before = self._averaged.clone()
        self._own = deque(self._averaged.clone() for _ in range(2))  # of this rank, in the last two steps
        self._own_step = OwnStep(0)
        self._outcomes: deque[Callable[[], Outcome]] = deque(maxlen=2)
        self.looks = world.size > 1 or self._averaged.device.type == "cpu"

    def skip_on_device(self) -> None:
        """Leave it to the optimizer to skip steps, by `found_inf`, if the host would wait for the device."""
        if self.looks and self._averaged.device.type != "cpu":
            self.found_inf = self._averaged.new_zeros(())

    def ask_to_stop(self) -> None:
        """Let all ranks agree to stop in the next exchange."""
        self._asked = True
        self._notes[_STOP].fill_(1.0)

    def note_changed_hosts(self) -> None:
        """Let all ranks agree in the next exchange that they must be formed again."""
        self._hosts_noted = True
        self._notes[_HOSTS].fill_(1.0)

    def note_step(self, own: OwnStep) -> None:
        """Note the step under way, for its outcome."""
        self._own_step = own
        if self._world.size > 1:
            halves = [half for checksum in own.checksums for half in divmod(checksum, 1 << _NOTE_BITS)]
            for note, half in zip(self._notes[_CHECKSUMS], halves, strict=True):
                note.fill_(half)

    def add_micro_batch(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch, after its backward."""
        if self.looks:
            self._notes[_LOSS].add_(loss.detach() * 0.0)  # 0, or nan

    def average_async(self) -> Wait:
        """Start the exchange; return the function that waits for it. Collective: every rank calls this."""
        self._own.rotate()
        self._own[0].copy_(self._averaged)
        wait = self._start_exchange()

        def wait_and_agree() -> None:
            wait()
            self._agree()

        return wait_and_agree

    def _start_exchange(self) -> Callable[[], object]:
        scale = 1.0 / self._world.size
        return self._world.collectives.allreduce_async(self._averaged, "statistics", scale)

    def outcomes(self, *, of_all: bool) -> Iterator[Outcome]:
        """Yield those that were not yielded before.

        Where the optimizer skips steps on the device, not that of the last step, unless `of_all`.
        """
        while len(self._outcomes) > (self.found_inf is not None and not of_all):
            yield self._outcomes.popleft()()

    def complete_step(self) -> None:
        """Keep the averages of the step, or drop them if they are not finite: they would stay so for ever."""
        if self.found_inf is not None:
            self._averaged.copy_(torch.where(self.found_inf > 0, self._before, self._averaged))
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
        own = self._own_step
        if not self.looks:
            outcome = Outcome(own, own.checksums, stop=self._asked, hosts_changed=self._hosts_noted)
            self._outcomes.append(lambda: outcome)
            return
        agreed, moved = torch.cat([self._notes, self._averaged.isfinite().all().view(1)]), self._own[0]
        if self.found_inf is None:
            outcome = self._outcome(own, moved, agreed.tolist())
            self.finite = outcome.finite
            self._outcomes.append(lambda: outcome)
            return
        self.found_inf.copy_(1.0 - agreed[-1])
        read = _read_later(agreed)
        self._outcomes.append(lambda: self._outcome(own, moved, read()))

    def _outcome(self, own: OwnStep, moved: Tensor, agreed: list[float]) -> Outcome:
        """Return the outcome of a step, given what this rank had moved into the exchange."""
        *notes, finite = agreed
        first, low_first, second, low_second = (round(mean * self._world.size) for mean in notes[_CHECKSUMS])
        sums = (first << _NOTE_BITS) + low_first, (second << _NOTE_BITS) + low_second
        return Outcome(
            own,
            sums if self._world.size > 1 else own.checksums,
            finite=bool(finite),
            stop=notes[_STOP] > 0,
            hosts_changed=notes[_HOSTS] > 0,
            fault=lambda: self._fault(moved),
        )

    def _fault(self, own: Tensor) -> str:
        moving, maxima, notes = own.tensor_split((-_NOTES - len(self.maxima), -_NOTES))
        parts = {"its loss is": notes, "its gradients are": maxima, "its batch-norm statistics are": moving}
        return next((f"{name} not finite" for name, part in parts.items() if not part.isfinite().all()), "")


def _read_later(values: Tensor) -> Callable[[], list[float]]:
    """Start copying values to the host; return a function that waits for them."""
    on_host, copied = values.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        found: list[float] = on_host.tolist()
        return found

    return read


def _flatten_in_place(tensors: list[Tensor]) -> Tensor:
    """Return one flat tensor of which the given tensors become views."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    offset = 0
    for tensor in tensors:
        tensor.data = flat[offset : offset + tensor.numel()].view_as(tensor)
        offset += tensor.numel()
    return flat
