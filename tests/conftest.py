"""The order of all tests, and what two pytest workers on one machine need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# Whole files go to one worker or the other, in this order: long ones first, so that both end together.
LONG_FIRST = ("experiments", "cluster", "ranks", "faults", "smoke", "gpu", "published")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag for tests that take minutes each."""
    parser.addoption("--long", action="store_true", help="also run tests/experiments/test_on_drawn_shapes.py")


def pytest_configure() -> None:
    """Leave each of several workers one thread."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """Undo what a run in this process sets for its libraries: later tests start ranks of their own."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders of long tests first; within a folder nothing changes."""
    items.sort(key=lambda item: _place(item.path))


def _place(file: Path) -> int:
    folder = file.relative_to(HERE).parts[0]
    return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)
