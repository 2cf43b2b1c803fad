"""What a sample that cannot be used raises."""

from __future__ import annotations


class BadSampleError(Exception):
    """One image or label map cannot be used; the text names it and says what is wrong with it."""
