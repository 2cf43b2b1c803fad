"""What TensorBoard's own reader finds in the folder of a run, against what is promised."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.plugins.hparams import metadata as hparams_metadata

TRAINING = {
    *("train/loss", "train/loss_smoothed", "train/class_loss", "train/class_loss_smoothed", "train/lr"),
    *("train/gradient_norm", "speed/images_per_second", "speed/model_tflops", "memory/host_gib"),
    *("time/data", "time/compute", "time/hours"),
}
OF_SEVERAL_RANKS = {
    *("time/exchange", "ranks/step_seconds_min", "ranks/step_seconds_median", "ranks/step_seconds_max"),
}
TEXTS = {"run/recipe", "run/model", "run/ranks"}
# A CPU has no peak and no memory of its own; without fp16 there is no loss scale; no image is damaged.
UNTOLD = {"speed/mfu", "memory/device_gib", "train/loss_scale", "train/bad_samples", "train/skipped_steps"}


class BoardReader:
    """The runs that `tensorboard --logdir` shows of a folder."""

    def __init__(self, folder: Path) -> None:
        sizes = dict.fromkeys(("scalars", "tensors", "images", "histograms"), 0)  # all
        self._read = EventMultiplexer(size_guidance=sizes, tensor_size_guidance=dict.fromkeys(_PLUGINS, 0))
        self._read.AddRunsFromDirectory(str(folder))
        self._read.Reload()

    @property
    def runs(self) -> set[str]:
        """Return the names of the runs."""
        return set(self._read.Runs())

    def tags(self, run: str, plugin: str) -> set[str]:
        """Return the tags of a plugin."""
        return set(self._read.PluginRunToTagToContent(plugin).get(run, {}))

    def tensors(self, run: str, tag: str) -> list[Any]:
        """Return the events of a tag."""
        found: list[Any] = self._read.Tensors(run, tag)
        return found

    def steps(self, run: str, tag: str) -> list[int]:
        """Return the steps of a tag."""
        return [event.step for event in self.tensors(run, tag)]

    def hparams(self, run: str) -> dict[str, Any]:
        """Return the parsed data of the plugin of hyperparameters by tag."""
        found = self._read.PluginRunToTagToContent("hparams")[run]
        parsers = {
            hparams_metadata.EXPERIMENT_TAG: hparams_metadata.parse_experiment_plugin_data,
            hparams_metadata.SESSION_START_INFO_TAG: hparams_metadata.parse_session_start_info_plugin_data,
            hparams_metadata.SESSION_END_INFO_TAG: hparams_metadata.parse_session_end_info_plugin_data,
        }
        return {tag: parsers[tag](content) for tag, content in found.items()}

    def layout(self, run: str) -> Layout:
        """Return the layout of custom scalars."""
        layout = Layout()
        layout.ParseFromString(self.tensors(run, CONFIG_SUMMARY_TAG)[0].tensor_proto.string_val[0])
        return layout


_PLUGINS = ("scalars", "text", "images", "histograms", "hparams", "custom_scalars")


def check_board(
    runs: Path, *, points: list[int], evaluations: list[int], more: set[str], ranks: int, score: str = "top1"
) -> BoardReader:
    """Assert that the run `run` in `runs` has all promised tags at these steps, each once, and no others."""
    board = BoardReader(runs)
    assert board.runs == {"run", "run/by_epoch_and_hour"}
    scalars = board.tags("run", "scalars")
    of_evaluations = {f"evaluation/{ema}{name}" for ema in ("", "ema_") for name in (score, "loss", "top5")}
    promised = TRAINING | of_evaluations | more | (OF_SEVERAL_RANKS if ranks > 1 else set())
    assert promised <= scalars
    assert scalars & UNTOLD == set()
    for tag in TRAINING - {"train/gradient_norm"}:  # which an epoch's end may lack
        assert board.steps("run", tag) == points, tag
    for tag in of_evaluations:
        assert board.steps("run", tag) == evaluations, tag
    for group in ("evaluation by epoch", "evaluation by hour"):
        steps = board.steps("run/by_epoch_and_hour", f"{group}/ema_{score}")
        assert len(steps) == len(evaluations)
        assert all(earlier <= later for earlier, later in itertools.pairwise(steps))
    assert board.tags("run", "text") >= TEXTS
    hparams = board.hparams("run")
    assert len(hparams) == 3
    start = hparams[hparams_metadata.SESSION_START_INFO_TAG]
    assert (start.group_name, start.hparams["model"].string_value) == ("run", "volo_demo")
    experiment = hparams[hparams_metadata.EXPERIMENT_TAG]
    assert [metric.name.tag for metric in experiment.metric_infos][:2] == [
        f"evaluation/{score}",
        f"evaluation/ema_{score}",
    ]
    assert {"accuracy", "loss", "update", "speed", "ranks"} == {
        category.title for category in board.layout("run").category
    }
    assert board.tags("run", "images") >= {"training/batch", "training/outlook attention"}
    return board
