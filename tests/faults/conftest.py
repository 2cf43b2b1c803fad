"""The images of runs that meet a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a demo set for ten steps of two ranks."""
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=80, val=20)
    return folder
