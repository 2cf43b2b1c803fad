"""The measured update is the engine's, and none is measured that goes another way than timm's."""

from __future__ import annotations

import pytest

from horovod_volo.bench import comparison
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.bench.machine import optimizer


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)


def test_all_sides_are_told() -> None:
    figures = {figure.label: figure.value for figure in optimizer.measure(model="volo_demo", pairs=2).figures}
    assert list(figures) == [
        "timm's defaults",
        "faster than timm's defaults",
        "timm's best",
        "faster than timm's best",
        "update",
        "copy",
        "update beside 50 bytes a parameter at that speed",
    ]
    assert min(figures.values()) > 0


@pytest.mark.parametrize("lost", ["bound", "average"])
def test_an_update_that_leaves_something_out_is_refused(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lost == "bound":
        monkeypatch.setattr(optimizer, "divide", lambda optimizer, divisor: None)
    else:
        monkeypatch.setattr(optimizer.Ema, "update", lambda average, step: None)
    with pytest.raises(WrongResultError, match="weights after" if lost == "bound" else "averages after"):
        optimizer.measure(model="volo_demo", pairs=2)
