"""The published code where a checkout of it is named, and the differences seen, at the end of a run."""

from __future__ import annotations

from typing import Protocol

import pytest
from torch import Tensor

from tests.published.checkouts import Published, load, named_folder

_TOLERANCE = 1e-4
_SEEN: list[str] = []


class Compare(Protocol):
    """What the fixture below returns."""

    def __call__(self, what: str, ours: Tensor, theirs: Tensor, tolerance: float = _TOLERANCE) -> None:
        """Raise where the largest difference is above the tolerance."""


@pytest.fixture(scope="session")
def published() -> Published:
    """Return the published modules."""
    return load(named_folder())


@pytest.fixture(scope="session")
def compare() -> Compare:
    """Return compare(what, ours, theirs); the largest difference is printed at the end."""

    def look(what: str, ours: Tensor, theirs: Tensor, tolerance: float = _TOLERANCE) -> None:
        assert ours.shape == theirs.shape
        assert theirs.isfinite().all()
        difference = (ours.double() - theirs.double()).abs().max().item()
        largest = theirs.abs().max().item()
        _SEEN.append(f"{what}: {difference:.1e} (largest difference, of values up to {largest:.3g})")
        assert difference <= tolerance, _SEEN[-1]

    return look


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the differences seen."""
    if _SEEN:
        terminalreporter.section("from the published code")
        for line in _SEEN:
            terminalreporter.write_line(line)
