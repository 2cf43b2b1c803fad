"""Counts damaged samples and replaces them by others, or ends the run, as --bad-samples says.

Invariant: the replacement is a function of the index alone, so that a repeated run on the same files sees
the same images. Neighbouring indices get replacements that lie far apart: when a whole shard is lost, its
images are replaced by as many different ones.
"""

import threading
from collections.abc import Callable
from math import gcd
from typing import Literal, TypeVar

from horovod_volo.core.errors import BadSampleError, UserError

T = TypeVar("T")
GOLDEN_RATIO = (5**0.5 - 1) / 2


class BadSampleTracker:
    """The damaged samples of one loader; its methods may be called by any thread."""

    def __init__(self, policy: Literal["skip", "fail"], limit: int) -> None:
        self.skipped = 0  # how often a sample was skipped, repetitions included
        self._policy = policy
        self._limit = limit
        self._messages: dict[int, str] = {}  # by index
        self._new_messages: list[str] = []
        self._undecodable: dict[int, str] = {}
        self._lock = threading.Lock()

    def read_or_replace(self, index: int, images: int, read: Callable[[int], T]) -> tuple[int, T]:
        """Return index and result of `read` for image `index` or for its first usable replacement."""
        stride = _stride(images)
        for attempt in range(images):
            candidate = (index + attempt * stride) % images
            found = self.read_or_skip(candidate, read)
            if found is not None:
                return candidate, found
        raise UserError("none of the images can be used. Look at the first ones named above.")

    def read_or_skip(self, index: int, read: Callable[[int], T]) -> T | None:
        """Return the result of `read` for one image; if it is damaged, count it and return None."""
        try:
            if index in self._undecodable:
                raise BadSampleError(self._undecodable[index])
            return read(index)
        except BadSampleError as error:
            self.add(index, error)
            return None

    def add(self, index: int, error: BadSampleError) -> None:
        """Count one skipped sample; raise UserError with policy "fail" or beyond the limit."""
        if self._policy == "fail":
            raise UserError(
                f"{error}. Repair or remove it, or skip such samples: --bad-samples skip."
            ) from error
        with self._lock:
            self.skipped += 1
            if index in self._messages:
                return
            self._messages[index] = str(error)
            self._new_messages.append(str(error))
            if len(self._messages) > self._limit:
                raise UserError(
                    f"{len(self._messages)} samples are damaged, the last: {error}. Check the storage, "
                    "repair the samples, or raise --bad-samples-limit."
                ) from error

    def add_undecodable(self, index: int, location: str) -> None:
        """Remember an image whose file looked complete, but could not be decoded."""
        self._undecodable[index] = f"{location} cannot be decoded"
        if self._policy == "fail":
            self.add(index, BadSampleError(self._undecodable[index]))

    def new_messages(self) -> list[str]:
        """Return one message for each sample that was found damaged since the last call."""
        with self._lock:
            messages, self._new_messages = self._new_messages, []
        return messages


def _stride(images: int) -> int:
    """Return a number coprime to `images`, near their golden section: its multiples visit all images."""
    return next(
        stride
        for stride in range(max(1, round(images * GOLDEN_RATIO)), 2 * images + 2)
        if gcd(stride, images) == 1
    )
