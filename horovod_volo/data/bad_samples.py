"""What becomes of samples that cannot be used: counted and replaced, or the end.

Invariant: the replacement is a rule, so that a run which is repeated on the same files sees the same
images, and every rank makes every step. It leads far away: where a whole shard is lost, its images are
replaced by as many others, not all by the one behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import gcd
from typing import Literal, TypeVar

from horovod_volo.core.errors import UserError

T = TypeVar("T")
GOLDEN = (5**0.5 - 1) / 2


class BadSampleError(Exception):
    """One image or label map cannot be used; the text names it and says what is wrong with it."""


class BadSampleTracker:
    """The damaged samples that one stream has met. Any thread may tell of one."""

    def __init__(self, policy: Literal["skip", "fail"], limit: int) -> None:
        self.skipped = 0  # how often a sample was left out
        self._policy = policy
        self._limit = limit
        self._met: dict[int, str] = {}  # by index: what is wrong with it
        self._undecodable: dict[int, str] = {}
        self._untold: list[str] = []
        self._lock = threading.Lock()

    def first_usable(self, index: int, images: int, read: Callable[[int], T]) -> tuple[int, T]:
        """Return what `read` makes of image `index`, or of the first that can be read in its place."""
        stride = _stride(images)
        for attempt in range(images):
            place = (index + attempt * stride) % images
            try:
                return place, self.usable(place, read)
            except BadSampleError:
                continue
        raise UserError("none of the images can be used. Look at the first ones named above.")

    def usable(self, index: int, read: Callable[[int], T]) -> T:
        """Read one image; raise BadSampleError if it is to be left out, which is then counted."""
        try:
            if index in self._undecodable:
                raise BadSampleError(self._undecodable[index])
            return read(index)
        except BadSampleError as error:
            self.meet(index, error)
            raise

    def meet(self, index: int, error: BadSampleError) -> None:
        """Count one sample that is left out; raise UserError where that is one too many."""
        if self._policy == "fail":
            raise UserError(
                f"{error}. Mend or remove it, or go on without such: --bad-samples skip."
            ) from error
        with self._lock:
            self.skipped += 1
            if index in self._met:
                return
            self._met[index] = str(error)
            self._untold.append(str(error))
            if len(self._met) > self._limit:
                raise UserError(
                    f"{len(self._met)} samples are damaged, the last: {error}. Look at the storage, mend the "
                    "samples, or raise --bad-samples-limit."
                ) from error

    def cannot_decode(self, index: int, location: str) -> None:
        """Remember an image that passed as whole, but could not be decoded."""
        self._undecodable[index] = f"{location} cannot be decoded"
        if self._policy == "fail":
            self.meet(index, BadSampleError(self._undecodable[index]))

    def untold(self) -> list[str]:
        """Return what was met since the last call, each sample once in the stream's life."""
        with self._lock:
            told, self._untold = self._untold, []
        return told


def _stride(images: int) -> int:
    """Return the step that leads to every image, and from close ones to ones far apart: a golden section."""
    return next(
        stride for stride in range(max(1, round(images * GOLDEN)), 2 * images + 2) if gcd(stride, images) == 1
    )
