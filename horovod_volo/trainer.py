"""The Python interface: a run of one process in a notebook, or of several ranks in a script, alike.

    from horovod_volo import Trainer

    trainer = Trainer("/path/to/images", model="volo_d1", epochs=30)
    result = trainer.fit()

Errors are exceptions. While `fit` trains, Ctrl-C asks it to save and to return; afterwards all signals do
what they did before. Invariant: every rank creates the same trainers and calls the same methods in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horovod_volo.cluster.entry import connect_once
from horovod_volo.config.command_line import build_config
from horovod_volo.config.schema import Config, all_settings
from horovod_volo.config.validation import check
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest
from horovod_volo.monitor.logger import EVALUATION, METRICS, kind_of, read_metrics

if TYPE_CHECKING:
    from os import PathLike

    from horovod_volo.engine.callbacks import Callback
    from horovod_volo.engine.task import Metrics
    from horovod_volo.evaluation.predictions import Classes

Weights = Literal["best", "last"]

# Heavy modules are imported where they are used, so that a mistake in a setting is reported at once.


@dataclass(frozen=True)
class TrainResult:
    """How a call of `fit` ended; the same on all ranks."""

    finished: bool  # False: a stop was requested before the last step, and the state is saved
    step: int  # steps taken since the start of the run
    last: Metrics  # of the last evaluation; empty before the first one
    best: Metrics  # of the evaluation of the best weights
    folder: Path  # the run folder


class Trainer:
    """Trains, evaluates and exports one network; alone, or on all ranks that a launcher has started."""

    def __init__(
        self,
        data: str | PathLike[str] = "",
        *,
        recipe: str = "",
        config: Config | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        """Check the settings; raise UserError for a mistake.

        `data` is the data folder. `settings` are those of the command line by name, such as `batch_size=64`;
        they override the `recipe`, a name or a TOML file. A `config` takes the place of all of them.
        `callbacks` are called at fixed points of the run.
        """
        if config is not None and (data or recipe or settings):
            raise UserError(
                "A Trainer takes a config, or a data folder, a recipe and settings. Drop one of them."
            )
        if config is None:
            config = build_config(recipe, _checked({"data_dir": data, **settings} if data else settings))
        check(config)
        if config.launch.elastic:
            raise UserError("Elastic runs are started by `horovod-volo train`. Drop elastic.")
        self.config = config
        self._callbacks = list(callbacks)
        self._ran, self._began = config, False  # the settings with what the start of a run chose

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.config.run.output) / self.config.run.name

    def fit(self) -> TrainResult:
        """Train to the end, or until a stop is requested; the next call resumes. Collective."""
        from horovod_volo.cluster.watchdog import watchdog_for
        from horovod_volo.engine.callbacks import StartAndEnd, standard_callbacks
        from horovod_volo.engine.interrupts import StopRequest
        from horovod_volo.engine.run import Start, run

        config, start = self.config, Start(begun=self._began)
        noted = StartAndEnd()
        with closing(watchdog_for(config.run.hang_timeout)) as watchdog, StopRequest.while_training() as stop:
            world = connect_once(config)
            try:
                callbacks = [*standard_callbacks(), noted, *self._callbacks]
                finished = run(config, world, stop, watchdog, callbacks, start)
            finally:
                self._ran, self._began = noted.config or self._ran, self._began or noted.config is not None
        return world.run_on_rank_zero(lambda: _read_result(self.folder, finished, noted.step))

    def evaluate(
        self,
        data: str | PathLike[str] | None = None,
        *,
        weights: Weights = "best",
        use_ema: bool = False,
        split: Literal["train", "val"] = "val",
    ) -> Metrics:
        """Return the metrics of the run's weights on its held-out images, or those in `data`. Collective.

        Every image counts once, whatever the number of ranks.
        """
        from horovod_volo.engine.classification_data import catalog_folder
        from horovod_volo.evaluate import build_parser
        from horovod_volo.evaluation.task_results import EVALUATIONS
        from horovod_volo.plugins import load_plugins

        settings = self._ran
        world = connect_once(settings)
        world.run_on_all_ranks(partial(load_plugins, settings.run.plugin))
        source = world.run_on_rank_zero(lambda: str(self._weights(weights)))
        flags = build_parser().parse_args([os.fspath(data or settings.data.data_dir), "--weights", source])
        of_run = ("workers", "image_decoder", "crop_pct", "cache_dir", "cache_gib")
        vars(flags).update({name: getattr(settings.data, name) for name in of_run})
        flags.use_ema, flags.split, flags.batch_size = use_ema, split, self._eval_batch()
        flags.precision = settings.model.precision
        flags.catalog_dir = str(catalog_folder(settings.data.catalog_dir, settings.run.output, world) or "")
        return EVALUATIONS.find(settings.model.task)(flags, world, lambda *_: None).metrics

    def predict(
        self, images: Any, *, top: int = 5, weights: Weights = "best", use_ema: bool = False
    ) -> list[Classes]:
        """Return the `top` most probable classes of each image, with their probabilities.

        `images` is a list of paths, bytes of image files, PIL images or arrays (height, width, 3) of uint8.
        """
        from horovod_volo.evaluation.predictions import predict
        from horovod_volo.models.pretrained import load_pretrained
        from horovod_volo.plugins import load_plugins

        if isinstance(images, str | bytes | Path) or not hasattr(images, "__len__"):
            raise UserError(f"predict takes a list of images, not a {type(images).__name__}.")
        settings = self._ran
        load_plugins(settings.run.plugin)
        trained = load_pretrained(str(self._weights(weights)), use_ema=use_ema)
        bad: list[str] = []
        how: dict[str, Any] = {"crop_pct": settings.data.crop_pct, "precision": settings.model.precision}
        found = dict(predict(trained, images, bad, top=top, batch_size=self._eval_batch(), **how))
        if bad:
            raise UserError(f"{bad[0]}. Leave it out.")
        return [found[number] for number in range(len(images))]

    def export(
        self,
        folder: str | PathLike[str],
        *,
        onnx: bool = False,
        weights: Weights = "best",
        use_ema: bool = False,
        force: bool = False,
    ) -> Path:
        """Export the network as `horovod-volo export` does; return the folder. Collective."""
        from horovod_volo import export

        world = connect_once(self.config)
        source = world.run_on_rank_zero(lambda: str(self._weights(weights)))
        options = export.build_parser().parse_args([source, str(folder)])
        options.onnx, options.use_ema, options.force = onnx, use_ema, force
        options.plugin = self.config.run.plugin
        world.run_on_rank_zero(lambda: export.export(options))
        return Path(folder)

    def _eval_batch(self) -> int:
        return self._ran.data.eval_batch_size or self._ran.data.batch_size

    def _weights(self, chosen: Weights) -> Path:
        path = self.folder / "checkpoints" / chosen
        if not path.exists():  # nothing was evaluated yet
            path = path.with_name("last")
        if not path.exists():
            raise UserError(f"{self.folder} holds no weights. Call fit() first.")
        return path


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of their settings, checked; raise UserError for a name that there is not."""
    settings = {setting.name: setting for setting in all_settings()}
    for name in given:
        if name not in settings:
            raise UserError(f"There is no setting {name!r}.{nearest(name, settings)}")
    plain = {name: os.fspath(each) if isinstance(each, os.PathLike) else each for name, each in given.items()}
    return {name: settings[name].checked(value, name) for name, value in plain.items()}


def _read_result(folder: Path, finished: bool, step: int) -> TrainResult:
    evaluations = [each for each in read_metrics(folder / METRICS) if kind_of(each) == EVALUATION]
    best = folder / "checkpoints" / "best" / "evaluation.json"
    return TrainResult(
        finished=finished,
        step=step,
        last=evaluations[-1] if evaluations else {},
        best=json.loads(best.read_text()) if best.exists() else {},
        folder=folder,
    )
