"""`train FOLDER` from published weights, which this test puts into the cache of the hub."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.evaluate import main as evaluate
from horovod_volo.models.build import build_model
from horovod_volo.report.__main__ import main as report
from horovod_volo.trainer import Trainer
from tests.smoke.conftest import publish, run_here

NAME = "hgnetv2_b2.ssld_stage2_ft_in1k"
SMALL = ("--img-size", "64", "--binding", "none", "--output")


class StopsAtOnce(Callback):
    """Requests a stop before the first step."""

    def started(self, run: TrainContext) -> None:
        run.request_stop()


def test_a_folder_alone_starts_from_published_weights(images, tmp_path, monkeypatch, capsys):
    def train(*flags: str, data: Path = images) -> str:
        done = run_here(str(data), *SMALL, str(tmp_path), *flags, streams=capsys)
        assert done.status == 0, done.output
        return done.output

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    torch.manual_seed(0)
    published = build_model(NAME, img_size=64, num_classes=1000, drop_path=0.0).state_dict()
    publish(tmp_path / "hub", NAME, published)
    run = tmp_path / images.name
    best = run / "checkpoints" / "best"
    stopped = Trainer(images, output=tmp_path, img_size=64, callbacks=[StopsAtOnce()]).fit()
    assert (stopped.finished, stopped.step, best.parent.exists()) == (False, 0, False)

    output = train()
    said = (f"weights from timm:{NAME}", "classifier fitted", "done: 0 steps")
    assert [text for text in said if text not in output] == []
    weights = load_file(best / "model.safetensors")
    changed = {name for name, tensor in published.items() if not torch.equal(tensor, weights[name])}
    assert changed == {"head.fc.weight", "head.fc.bias"}

    shutil.rmtree(tmp_path / "hub" / f"models--timm--{NAME}")  # a finished run needs no published weights
    assert "classifier fitted" not in train("--resume", "auto")
    assert evaluate([str(images), "--weights", str(run)]) == 0
    top1 = json.loads((best / "evaluation.json").read_text())["top1"]
    assert f"{top1:.3f} %" in capsys.readouterr().out
    assert report([str(run), "--html", str(tmp_path / "report.html")]) == 0

    output = train("--name", "tuned", "--weights", str(run), "--epochs", "1")
    assert "after epoch 0 of 1: top-1" in output
    assert "after epoch 1 of 1: top-1" in output
    assert NAME in (tmp_path / "tuned" / "resolved.toml").read_text()
    output = train("--name", "scratch", "--epochs", "1", data=images / "train")
    assert "held-out images (10 % of each class)" in output
    assert f"training begins from scratch, because timm:{NAME}" in output
