"""Horovod data-parallel trainer for VOLO vision transformers.

The names below are the Python interface (docs/python.md). Each is imported when it is first used: importing
the package imports neither torch nor Horovod.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_volo.config.schema import Config
    from horovod_volo.core.errors import UserError
    from horovod_volo.engine.callbacks import Callback
    from horovod_volo.engine.context import TrainContext
    from horovod_volo.trainer import Trainer, TrainResult

__all__ = ["Callback", "Config", "TrainContext", "TrainResult", "Trainer", "UserError"]

_HOMES = {
    "Callback": "engine.callbacks",
    "Config": "config.schema",
    "TrainContext": "engine.context",
    "TrainResult": "trainer",
    "Trainer": "trainer",
    "UserError": "core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
