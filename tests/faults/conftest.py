"""The images of runs that meet a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def images(demo_images: Callable[[int, int], Path]) -> Path:
    """Make a demo set for ten steps of eight images."""
    return demo_images(80, 20)
