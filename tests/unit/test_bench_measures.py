"""Each benchmark runs at a tiny size, reports its figures, and refuses wrong values."""

from __future__ import annotations

import json
from dataclasses import replace

import published_targets as published
import pytest
import torch

from horovod_volo.bench import __main__ as command_line
from horovod_volo.bench import comparison, loader, loss, peers, reduce, step
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.bench.loss import PublishedLoss
from horovod_volo.bench.synthetic import random_labels
from horovod_volo.cluster.world import RankResources
from horovod_volo.config.task_settings import Objective
from horovod_volo.core.errors import UserError
from horovod_volo.objective.mixing import Box

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks short, and leave torch's threads as they are."""
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)
    resources = RankResources(device=CPU, threads=1, binding="test")
    monkeypatch.setattr("horovod_volo.bench.synthetic.rank_resources", lambda world: resources)


def test_random_label_maps_are_well_formed() -> None:
    labels = random_labels(3, 7, CPU, seed=4)
    assert labels.maps is not None
    assert (labels.maps.ids.sort(dim=1).values.diff(dim=1) > 0).all()  # the classes of a cell are distinct
    assert int(labels.maps.ids.min()) >= 0
    assert int(labels.maps.ids.max()) < 7
    corners, extents = labels.maps.boxes.split(2, dim=1)
    assert (corners >= 0).all()
    assert (extents > 0).all()
    assert (corners + extents <= 1).all()


def test_the_peer_is_the_published_loss() -> None:
    settings = Objective(token_label=True, token_label_data="maps", cls_weight=0.75, dense_weight=0.25)
    labels = random_labels(4, 9, CPU, seed=1)
    maps = (labels.maps.scores, labels.maps.ids, labels.maps.boxes)
    box = Box(top=0, left=1, height=2, width=1, grid=3)
    generator = torch.Generator().manual_seed(2)
    class_logits = torch.randn(4, 9, generator=generator)
    token_logits = torch.randn(4, 9, 9, generator=generator)
    crop, tokens = (
        published.smooth(published.batch_target(*maps, side, 9, "corrected"), settings.smoothing)
        for side in (1, 3)
    )
    mixed = box.lam * crop.squeeze(1) + (1 - box.lam) * crop.squeeze(1).flip(0)
    expected = 0.75 * published.cross_entropy(class_logits.double(), mixed)
    expected += 0.25 * published.cross_entropy(token_logits.double(), tokens)
    found = PublishedLoss(settings, 9, 3)(class_logits, token_logits, labels, box)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_wrong_loss_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "loss --classes 40 60 --batch-sizes 2 --pairs 3"
    assert command_line.main([*flags.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["command"] == f"python -m horovod_volo.bench {flags}"
    assert [figure["label"].split(" classes")[0] for figure in record["figures"]] == 4 * ["40"] + 4 * ["60"]
    assert all(figure["value"] > 0 for figure in record["figures"])
    right = loss.build_loss
    # A thousandth of the smoothing too much.
    monkeypatch.setattr(
        loss, "build_loss", lambda settings, *sizes: right(replace(settings, smoothing=0.1001), *sizes)
    )
    with pytest.raises(WrongResultError, match="of ours at 40 classes, batch 2"):
        loss.measure(batch_sizes=[2], classes=[40], pairs=2)


@pytest.mark.parametrize("flags", ["loss --pairs 1", "loss --pairs x", "loss --classes 4", "los"])
def test_a_mistake_is_an_error_message(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = command_line.main(flags.split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert "error" in capsys.readouterr().err


def test_a_step_is_measured() -> None:
    result = step.measure(model="volo_demo", img_size=32, batch_size=2, precision="fp32", pairs=3)
    figures = {figure.label: figure.value for figure in result.figures}
    assert list(figures) == ["images a second", "whole step", "first 3 steps"]
    assert figures["images a second"] == pytest.approx(2000 / figures["whole step"])


def test_steps_are_compared_with_those_of_timms_network() -> None:
    settings = {"model": "volo_demo", "img_size": 32, "batch_size": 2, "pairs": 2}
    result = peers.measure(**settings, against=["eager", "published"])
    assert all(figure.value > 0 for figure in result.figures)
    assert {"faster than eager", "faster than published"} <= {figure.label for figure in result.figures}


def test_nothing_is_reduced_on_one_rank() -> None:
    with pytest.raises(UserError, match="horovodrun -np 2"):
        reduce.measure(model="volo_demo", img_size=32, batch_size=2, pairs=3)


def test_loader_reports_both_rates() -> None:
    result = loader.measure(images=12, img_size=32, batch_size=3, pairs=2)
    names = [figure.label for figure in result.figures]
    assert names == ["images a second", "timm's loader", "faster than timm's loader"]
    assert all(figure.value > 0 for figure in result.figures)
    with pytest.raises(UserError, match=r"9 images are no batch of 1000\. Use --batch-size 9"):
        loader.measure(images=9, batch_size=1000)
