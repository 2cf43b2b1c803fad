"""Settings of what is logged beside the log and the metrics, and where to: a part of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_volo.config.setting import setting
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest

LOGGERS = ("csv", "mlflow", "wandb")


@dataclass(frozen=True)
class Logging:
    """pictures, histograms and further loggers"""

    log_to: str = setting("", "log metrics to wandb, mlflow or csv too; may be repeated", repeatable=True)
    images_every: int = setting(
        10,
        "epochs between pictures of training images and of outlook attention in TensorBoard, from the start "
        "on; 0: none",
        at_least=0,
    )
    histograms_every: int = setting(
        0,
        "epochs between histograms of weights and gradients in TensorBoard, by block, from the start on; "
        "0: none",
        at_least=0,
    )


def loggers(settings: Logging) -> tuple[str, ...]:
    """Return the names in --log-to, each once."""
    return tuple(dict.fromkeys(name for part in settings.log_to.split(",") if (name := part.strip())))


def check_loggers(settings: Logging) -> None:
    """Raise UserError for a logger that there is not."""
    for name in loggers(settings):
        if name not in LOGGERS:
            raise UserError(f"--log-to takes {' or '.join(LOGGERS)}, not {name!r}.{nearest(name, LOGGERS)}")
