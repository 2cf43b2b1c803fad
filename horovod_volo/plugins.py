"""Plugins: models, losses, optimizers, schedules, augmentation and callbacks of your own import from here.

A plugin is a Python module that calls `register_model`, `register_loss`, `register_optimizer`,
`register_schedule`, `register_rand_augment` or `register_callback` when it is imported. Plugins are imported
before the settings' names are looked up (docs/plugins.md).
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeVar

from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError, error_of_code
from horovod_volo.data.augmentation import operations
from horovod_volo.data.augmentation.operations import Kind, Operation
from horovod_volo.data.augmentation.policy import register_rand_augment
from horovod_volo.models.registry import ModelSpec, register_model
from horovod_volo.objective.loss import LossParts, register_loss
from horovod_volo.optim.build import check_optimizer, register_optimizer
from horovod_volo.optim.schedule import SCHEDULES, register_schedule

__all__ = ["Kind", "LossParts", "ModelSpec", "Operation", "operations", "register_callback"]
__all__ += ["register_loss", "register_model", "register_optimizer", "register_rand_augment"]
__all__ += ["register_schedule"]

ENTRY_POINTS = "horovod_volo.plugins"
BuildCallback = TypeVar("BuildCallback", bound=Callable[[], object])

_callbacks: list[tuple[str, Callable[[], object]]] = []  # with the modules that registered them


def load_plugins(modules: str) -> None:
    """Import the comma-separated modules and the installed entry points of group `horovod_volo.plugins`."""
    for name in _names(modules):
        _load(f"--plugin {name}", name, partial(import_module, name))
    for point in entry_points(group=ENTRY_POINTS):
        _load(f"The installed plugin {point.name} ({point.value})", point.module, point.load)


def register_callback(build: BuildCallback) -> BuildCallback:
    """Have each run with this plugin call a callback: `build`, such as its class, makes one for each run.

    It may be used as the decorator of the class.
    """
    _callbacks.append((sys._getframe(1).f_globals["__name__"], build))
    return build


def callbacks_of_plugins(modules: str) -> list[tuple[str, Callable[[], object]]]:
    """Return what the comma-separated modules, and installed plugins, registered, with the module of each.

    Other modules of this process may be plugins of other runs.
    """
    plugins = [*_names(modules), *(point.module for point in entry_points(group=ENTRY_POINTS))]
    return [
        (module, build)
        for module, build in _callbacks
        if any(f"{module}.".startswith(f"{plugin}.") for plugin in plugins)
    ]


def _names(modules: str) -> list[str]:
    return [name for part in modules.split(",") if (name := part.strip())]


def check_names(config: Config) -> None:
    """Raise UserError if no optimizer or schedule has the name that the settings give."""
    update, sharded = config.update, config.update.shard_optimizer
    check_optimizer(update.opt, sharded=sharded, betas=update.opt_betas, eps=update.opt_eps)
    SCHEDULES.find(config.update.sched)


def _load(plugin: str, module: str, load: Callable[[], object]) -> None:
    try:
        load()
    except UserError as problem:
        raise UserError(f"{plugin}: {problem}") from None
    except Exception as error:  # a plugin may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise UserError(
                f"{plugin}: there is no module {missing!r}. Install it on every host, or add its folder to "
                "PYTHONPATH."
            ) from error
        what = f"{plugin} failed while it was imported"
        raise error_of_code(what, error, "Correct the plugin, or leave it out.") from error
