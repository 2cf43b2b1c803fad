"""Weights of classes in the loss against dense targets in float64, and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import published_targets as published
import pytest
import torch
from test_objective_loss import BOX, CLASSES, SIDE, TEACHER, labels_with_maps, random_logits
from torch import Tensor

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.objective.loss import ClassWeights, build_loss, read_class_weights
from horovod_volo.objective.mixing import NO_BOX, Mix

WEIGHTS = torch.linspace(0.1, 4.0, CLASSES, dtype=torch.float64)
NAMES = [f"class {number}" for number in range(CLASSES)]


def dense_targets(labels: Labels, settings: Objective) -> tuple[Tensor, Tensor]:
    """Return the targets of images (batch, classes) and tokens (batch, tokens, classes), not smoothed."""
    truth = published.one_hot(labels.classes, CLASSES)
    if not settings.token_label_data:
        return truth, truth[:, None].expand(-1, SIDE * SIDE, -1)
    assert labels.maps is not None
    maps = (labels.maps.scores, labels.maps.ids, labels.maps.boxes)
    crop = published.batch_target(*maps, 1, CLASSES, settings.label_geometry).squeeze(1)
    return crop, published.batch_target(*maps, SIDE, CLASSES, settings.label_geometry)


def weighted_loss(logits: Tensor, target: Tensor, settings: Objective, lam: float) -> Tensor:
    """Return the mean over rows of the mixed loss; the target is (rows, classes)."""
    weight = (target * WEIGHTS).sum(dim=1, keepdim=True)
    smoothing = settings.smoothing
    if settings.token_label_data:
        smooth = published.smooth(target, smoothing)
    else:
        smooth = (1 - smoothing) * target + smoothing / CLASSES
    row = weight * smooth
    return published.cross_entropy(logits, lam * row + (1 - lam) * row.flip(0))


@pytest.mark.parametrize("mix", [NO_BOX, BOX])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["classes", "tokens", "maps"])
def test_the_loss_and_its_gradients_equal_dense_ones(kind: str, smoothing: float, mix: Mix) -> None:
    data = TEACHER.token_label_data if kind == "maps" else ""
    settings = replace(TEACHER, smoothing=smoothing, token_label=kind != "classes", token_label_data=data)
    labels = labels_with_maps()
    logits = [tensor.requires_grad_() for tensor in random_logits()]
    exact = [tensor.detach().double().requires_grad_() for tensor in logits]
    parts = build_loss(settings, CLASSES, SIDE, ClassWeights(WEIGHTS.tolist()))(*logits, labels, mix)
    classes, tokens = dense_targets(labels, settings)
    expected = settings.cls_weight * weighted_loss(exact[0], classes, settings, mix.lam)
    if settings.token_label:
        token_loss = weighted_loss(exact[1].flatten(0, 1), tokens.flatten(0, 1), settings, 1.0)
        expected = expected + settings.dense_weight * token_loss
    torch.testing.assert_close(parts.total.double(), expected, rtol=1e-5, atol=1e-5)
    parts.total.backward()
    expected.backward()
    for ours, theirs in zip(logits, exact, strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    unweighted = build_loss(settings, CLASSES, SIDE)(*random_logits(), labels, mix).total
    assert abs(float(unweighted - parts.total.detach())) > 1e-3
    ones = build_loss(settings, CLASSES, SIDE, ClassWeights([1.0] * CLASSES))
    torch.testing.assert_close(ones(*random_logits(), labels, mix).total, unweighted)


def test_balanced_weights_even_out_the_classes() -> None:
    targets = np.array([0] * 6 + [1] * 3 + [3], np.int32)
    weights = read_class_weights("balanced", NAMES[:4], targets)
    assert weights is not None
    of_class = weights._on(torch.device("cpu")).double().numpy()
    assert of_class[targets].mean() == pytest.approx(1)
    sums = [of_class[targets[targets == number]].sum() for number in (0, 1, 3)]
    assert sums == pytest.approx([10 / 3] * 3)
    assert of_class[2] == 1  # a class without images
    assert read_class_weights("", NAMES, targets) is None


def test_weights_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.txt"
    file.write_text(
        "\n".join(f"{name}  {number}" for number, name in reversed(list(enumerate(NAMES)))) + "\n\n"
    )
    weights = read_class_weights(str(file), NAMES, np.zeros(1, np.int32))
    assert weights is not None
    assert weights._on(torch.device("cpu")).tolist() == list(range(CLASSES))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cat", "Line 1 of FILE is not CLASS WEIGHT"),
        ("cat -1", "at least 0: 'cat -1'"),
        ("cat nan", "at least 0"),
        ("cat 1\nbog 2", "Did you mean dog?"),
        ("cat 1\ncat 2", "Line 2 of FILE names 'cat' again"),
        ("cat 1", "FILE has no weight of 'dog'"),
        ("cat 0\ndog 0", "FILE are 0"),
    ],
)
def test_mistakes_in_a_file_name_their_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.txt"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        read_class_weights(str(file), ["cat", "dog"], np.zeros(1, np.int32))
    assert said in str(raised.value).replace(str(file), "FILE")
    with pytest.raises(UserError, match="cannot be read"):
        read_class_weights(str(tmp_path / "none"), ["cat"], np.zeros(1, np.int32))
