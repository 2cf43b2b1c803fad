"""The cost of Muon's update counts all work."""

from __future__ import annotations

import pytest

from horovod_volo.bench import comparison
from horovod_volo.bench.machine import muon


def test_the_cost_of_an_update_is_measured_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)
    with comparison.one_thread():  # which restores the number of threads
        result = muon.measure(model="volo_demo", pairs=2)
    figures = {figure.label: figure.value for figure in result.figures}
    assert result.name == "muon volo_demo 1 rank"
    assert figures["operations of all matrices"] == figures["operations of the busiest rank"] > 1
    assert figures["time relative to AdamW's"] > 1
    assert figures["message of all updates"] == pytest.approx(4 * 0.52e6 / 2**20, rel=0.05)
