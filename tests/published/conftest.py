"""The published code, and comparisons with it, whose differences are printed at the end of a run."""

import pytest
from torch import Tensor

from tests.published.checkouts import PublishedCode, load, named_folder

_DIFFERENCES: list[str] = []


@pytest.fixture(scope="session")
def published() -> PublishedCode:
    return load(named_folder())


def compare(what: str, ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """Raise if the largest difference is above the tolerance; record it."""
    assert ours.shape == theirs.shape
    assert theirs.isfinite().all()
    difference = (ours.double() - theirs.double()).abs().max().item()
    largest = theirs.abs().max().item()
    _DIFFERENCES.append(f"{what}: {difference:.1e} (largest difference, of values up to {largest:.3g})")
    assert difference <= tolerance, _DIFFERENCES[-1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recorded differences."""
    if _DIFFERENCES:
        terminalreporter.section("from the published code")
        for line in _DIFFERENCES:
            terminalreporter.write_line(line)
