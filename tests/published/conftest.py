"""Fixtures with the published code and for comparisons, whose differences are printed at the end of a run."""

from __future__ import annotations

from typing import Protocol

import pytest
from torch import Tensor

from tests.published.checkouts import PublishedCode, load, named_folder

_TOLERANCE = 1e-4
_DIFFERENCES: list[str] = []


class Compare(Protocol):
    """The type of the fixture `compare`."""

    def __call__(self, what: str, ours: Tensor, theirs: Tensor, tolerance: float = _TOLERANCE) -> None:
        """Raise if the largest difference is above the tolerance."""


@pytest.fixture(scope="session")
def published() -> PublishedCode:
    """Return the published modules."""
    return load(named_folder())


@pytest.fixture(scope="session")
def compare() -> Compare:
    """Return compare(what, ours, theirs); the largest difference is printed at the end."""

    def compare_tensors(what: str, ours: Tensor, theirs: Tensor, tolerance: float = _TOLERANCE) -> None:
        assert ours.shape == theirs.shape
        assert theirs.isfinite().all()
        difference = (ours.double() - theirs.double()).abs().max().item()
        largest = theirs.abs().max().item()
        _DIFFERENCES.append(f"{what}: {difference:.1e} (largest difference, of values up to {largest:.3g})")
        assert difference <= tolerance, _DIFFERENCES[-1]

    return compare_tensors


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recorded differences."""
    if _DIFFERENCES:
        terminalreporter.section("from the published code")
        for line in _DIFFERENCES:
            terminalreporter.write_line(line)
