"""The optimizer benchmark measures the engine's update, and only one whose results equal timm's."""

from __future__ import annotations

import pytest

from horovod_volo.bench import comparison
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.bench.machine import optimizer


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)


def test_all_updates_are_measured() -> None:
    figures = {figure.label: figure.value for figure in optimizer.measure(model="volo_demo", pairs=2).figures}
    assert list(figures) == [
        "timm's defaults",
        "faster than timm's defaults",
        "timm's best",
        "faster than timm's best",
        "update",
        "copy",
        "update: time relative to moving 50 bytes per parameter at the copy's rate",
    ]
    assert min(figures.values()) > 0


@pytest.mark.parametrize("left_out", ["bound", "average"])
def test_an_update_with_other_results_is_refused(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if left_out == "bound":
        monkeypatch.setattr("horovod_volo.engine.step.divide", lambda optimizer, divisor: None)
    else:
        monkeypatch.setattr("horovod_volo.optim.ema.Ema.update", lambda average, step: None)
    with pytest.raises(WrongResultError, match="weights after" if left_out == "bound" else "averages after"):
        optimizer.measure(model="volo_demo", pairs=2)
