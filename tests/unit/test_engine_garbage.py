"""Python's collector rests while training runs, and goes on as before after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from horovod_volo.engine.loop import garbage_collected_at_log_points


class Knot:
    """Something that refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def tie_many() -> list[weakref.ref[Knot]]:
    """Leave far more garbage than the collector ever lets gather by itself."""
    return [weakref.ref(Knot()) for _ in range(20_000)]


def test_garbage_stays_until_it_is_asked_for() -> None:
    before = weakref.ref(Knot())
    with garbage_collected_at_log_points():
        assert before() is None  # what lay there was taken out first: frozen, it would stay for ever
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        knots = tie_many()
        assert all(knot() is not None for knot in knots)
        gc.collect()
        assert all(knot() is None for knot in knots)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert any(knot() is None for knot in tie_many())


@pytest.mark.parametrize("was_enabled", [True, False])
def test_after_an_error_the_collector_is_as_before(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    with pytest.raises(KeyError), garbage_collected_at_log_points():
        raise KeyError
    assert gc.isenabled() == was_enabled
    assert gc.get_freeze_count() == 0
