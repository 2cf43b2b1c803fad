"""When Python looks for garbage: where all ranks stand still, and nowhere else.

Left alone, the collector stops each host at a moment of its own, and in a ring all wait for the one that
stands still: among 256 ranks one nearly always does. What gathers between two log points is little, DALI's
small objects of each batch; a step's tensors are freed without the collector.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Inside, garbage is collected by `gc.collect()` alone, which passes over what was there before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # networks, catalogs and modules live to the end: not to be gone through at every log point
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
