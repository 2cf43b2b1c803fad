"""Agreement of all ranks, at every step, on whether one of them was asked to stop.

The flag of each rank is averaged over ranks together with the batch-norm statistics, so that the agreement
costs no message. On a GPU the host reads the flag one step later, so that it never waits for it.
"""

from __future__ import annotations

from torch import Tensor


class StopVote:
    """A flag that each rank may set before the exchange of a step; afterwards `agreed` is equal on all ranks."""

    def __init__(self, ranks: int, like: Tensor) -> None:
        self.flag = like.new_zeros(1)  # averaged over ranks
        self.agreed = False
        self._asked = False
        self._alone = ranks == 1
        self._on_host = self.flag.new_zeros(1, device="cpu", pin_memory=self.flag.is_cuda)

    def ask(self) -> None:
        """Ask all ranks to stop."""
        if not self._asked:
            self._asked = True
            self.flag.fill_(1.0)

    def count(self) -> None:
        """Set `agreed`, after the flag was averaged. Collective: every rank calls this."""
        if self._alone:
            self.agreed = self._asked
        elif self.flag.is_cuda:
            # The copy of the step before is complete: this step's exchange came after it on the stream.
            self.agreed = bool(self._on_host > 0)
            self._on_host.copy_(self.flag, non_blocking=True)
        else:
            self.agreed = bool(self.flag > 0)
