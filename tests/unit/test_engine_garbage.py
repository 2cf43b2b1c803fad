"""Automatic garbage collection is disabled during training and restored after it."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from horovod_volo.engine.loop import garbage_collected_at_log_points


class Cycle:
    """An object that refers to itself, so that only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def restore_collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def create_many() -> list[weakref.ref[Cycle]]:
    """Create far more garbage than triggers an automatic collection."""
    return [weakref.ref(Cycle()) for _ in range(20_000)]


def test_garbage_is_collected_on_call_only() -> None:
    before = weakref.ref(Cycle())
    with garbage_collected_at_log_points():
        assert before() is None  # collected before the freeze, which would exempt it from collection
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        cycles = create_many()
        assert all(cycle() is not None for cycle in cycles)
        gc.collect()
        assert all(cycle() is None for cycle in cycles)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert any(cycle() is None for cycle in create_many())


def test_an_error_restores_a_collector_that_was_disabled() -> None:
    gc.disable()
    with pytest.raises(KeyError), garbage_collected_at_log_points():
        raise KeyError
    assert (gc.isenabled(), gc.get_freeze_count()) == (False, 0)
