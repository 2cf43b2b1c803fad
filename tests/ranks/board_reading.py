"""What TensorBoard's own reader finds in the folder of a run, against what is promised."""

import itertools
from pathlib import Path

from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.plugins.hparams import metadata

TRAINING = {
    *("train/loss", "train/class_loss", "train/lr", "train/gradient_norm", "speed/images_per_second"),
    *("speed/model_tflops", "memory/host_gib", "time/data", "time/compute", "time/hours"),
}
OF_SEVERAL_RANKS = {"time/exchange", *(f"ranks/step_seconds_{which}" for which in ("min", "median", "max"))}
# A CPU has no peak and no memory of its own; without fp16 there is no loss scale; no image is damaged.
UNTOLD = {"speed/mfu", "memory/device_gib", "train/loss_scale", "train/bad_samples", "train/skipped_steps"}
_PLUGINS = ("scalars", "text", "images", "hparams", "custom_scalars")


class BoardReader:
    """The runs that `tensorboard --logdir` shows of a folder."""

    def __init__(self, folder: Path) -> None:
        sizes = dict.fromkeys(("scalars", "tensors", "images"), 0)  # all
        self.read = EventMultiplexer(size_guidance=sizes, tensor_size_guidance=dict.fromkeys(_PLUGINS, 0))
        self.read.AddRunsFromDirectory(str(folder))
        self.read.Reload()

    def contents(self, run: str, plugin: str) -> dict[str, bytes]:
        """Return what a plugin has of a run, by tag."""
        return dict(self.read.PluginRunToTagToContent(plugin).get(run, {}))

    def tags(self, run: str, plugin: str) -> set[str]:
        """Return the tags of a plugin."""
        return set(self.contents(run, plugin))

    def steps(self, run: str, tag: str) -> list[int]:
        """Return the steps of a tag."""
        return [event.step for event in self.read.Tensors(run, tag)]


def check_board(
    runs: Path, *, points: list[int], evaluations: list[int], more: set[str], ranks: int
) -> BoardReader:
    """Assert that the run `run` in `runs` has all promised tags at these steps, each once, and no others."""
    board = BoardReader(runs)
    assert set(board.read.Runs()) == {"run", "run/by_epoch_and_hour"}
    scalars = board.tags("run", "scalars")
    of_evaluations = {f"evaluation/{ema}{name}" for ema in ("", "ema_") for name in ("top1", "loss", "top5")}
    assert TRAINING | of_evaluations | more | (OF_SEVERAL_RANKS if ranks > 1 else set()) <= scalars
    assert scalars & UNTOLD == set()
    for tag in TRAINING - {"train/gradient_norm"}:  # which an epoch's end may lack
        assert board.steps("run", tag) == points, tag
    for tag in of_evaluations:
        assert board.steps("run", tag) == evaluations, tag
    for group in ("evaluation by epoch", "evaluation by hour"):
        steps = board.steps("run/by_epoch_and_hour", f"{group}/ema_top1")
        assert len(steps) == len(evaluations)
        assert all(earlier <= later for earlier, later in itertools.pairwise(steps))
    assert "run/recipe" in board.tags("run", "text")
    assert "training/batch" in board.tags("run", "images")
    hparams = board.contents("run", "hparams")
    assert len(hparams) == 3
    start = metadata.parse_session_start_info_plugin_data(hparams[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["model"].string_value == "volo_demo"
    experiment = metadata.parse_experiment_plugin_data(hparams[metadata.EXPERIMENT_TAG])
    names = [metric.name.tag for metric in experiment.metric_infos]
    assert names[:2] == ["evaluation/top1", "evaluation/ema_top1"]
    layout = Layout()
    layout.ParseFromString(board.read.Tensors("run", CONFIG_SUMMARY_TAG)[0].tensor_proto.string_val[0])
    titles = {category.title for category in layout.category}
    assert titles == {"accuracy", "loss", "update", "speed", "ranks"}
    return board
