"""The loss with targets from label maps, against dense published formulas and RoIAlign by loops."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, get_args

import published_targets as published
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.profiler import ProfilerActivity, profile

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import LabelMaps, Labels
from horovod_volo.objective.label_map import Geometry, map_targets, most_probable, roi_weights
from horovod_volo.objective.loss import LossParts, build_loss
from horovod_volo.objective.mixing import NO_BOX, Box, ImageMix
from horovod_volo.objective.soft_target import SoftTarget


def most_allocated(compute: Callable[[], object]) -> int:
    """Return the bytes that are allocated at the same time, at most, while something is computed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        compute()
    # Every allocation is among the raw events; the profiler's own table has sums by operation.
    events = watched.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), int(each.nbytes())) for each in events if each.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


GEOMETRIES = get_args(Geometry)


def map_target(scores: Tensor, ids: Tensor, boxes: Tensor, *, side: int, **how: Any) -> SoftTarget:
    (target,) = map_targets(scores, ids, boxes, sides=(side,), **how)
    return target


def dense_target(
    scores: Tensor, ids: Tensor, boxes: Tensor, side: int, num_classes: int, geometry: Geometry
) -> Tensor:
    """Return our target in dense form, (batch, side x side, classes)."""
    target = map_target(scores, ids, boxes, side=side, num_classes=num_classes, geometry=geometry)
    return published.dense(target, num_classes).unflatten(0, (len(scores), side * side))


SPECIAL_BOXES = [
    (0.0, 0.0, 1.0, 1.0),  # whole image
    (0.0, 0.5, 0.5, 0.5),  # whole numbers of cells, where the number of samples steps up
    (0.96875, 0.9375, 0.03125, 0.0625),  # smaller than a cell, in the last corner: extended beyond the map
    (0.25, 0.0, 0.0625, 1.0),  # a strip
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("height", "width", "side", "k", "num_classes"),
    [
        (18, 18, 14, 5, 40),
        (18, 18, 1, 5, 40),
        (8, 8, 4, 3, 3),  # every class in every cell, so that no class has logit 0
        (8, 8, 8, 3, 12),
        (7, 7, 7, 5, 1000),
        (5, 5, 12, 2, 7),  # more tokens than cells
        (9, 9, 2, 1, 6),
        (1, 1, 3, 2, 5),
        (6, 9, 4, 2, 11),
        (9, 6, 4, 2, 11),
    ],
)
def test_targets_equal_the_published_formula(height, width, side, k, num_classes, geometry):
    scores, ids, boxes = published.random_maps(6, k, height, width, num_classes, seed=height * side)
    boxes[: len(SPECIAL_BOXES)] = torch.tensor(SPECIAL_BOXES)
    expected = published.batch_target(scores, ids, boxes, side, num_classes, geometry)
    actual = dense_target(scores, ids, boxes, side, num_classes, geometry)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(18, 18), (9, 9), (6, 11), (1, 1)])
@pytest.mark.parametrize("side", [1, 4, 14])
def test_boxes_beyond_their_map_read_its_nearest_cells(height: int, width: int, side: int) -> None:
    scores, ids, _ = published.random_maps(8, 2, height, width, 11, seed=20)
    boxes = torch.tensor(
        [
            [-0.3, 0.1, 1.6, 0.8],  # beyond above and below
            [0.1, -0.25, 0.8, 0.75],  # to the left
            [0.5, 0.5, 0.9, 1.25],  # below and to the right
            [-1.5, 0.2, 1.0, 0.3],  # outside the map
            [0.2, 1.25, 0.3, 1.0],
            [-0.75, -0.5, 2.5, 2.0],
            [0.25, 0.25, 0.5, 0.5],  # inside, in a batch with boxes outside
            [0.98, 0.1, 0.04, 0.5],  # smaller than a cell
        ]
    )
    expected = published.batch_target(scores, ids, boxes, side, 11, "corrected")
    how = {"num_classes": 11, "geometry": "corrected", "reach": float(boxes[:, 2:].max())}
    target = map_target(scores, ids, boxes, side=side, **how)
    actual = published.dense(target, 11).unflatten(0, (8, side * side))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extreme", [1e4, -1e4, 60000.0])
def test_targets_of_extreme_logits_are_finite(extreme: float) -> None:
    scores, ids, boxes = published.random_maps(2, 2, 4, 4, 9, seed=11)
    scores = (scores.sign() * extreme).half()
    expected = published.batch_target(scores, ids, boxes, 2, 9, "corrected")
    found = dense_target(scores, ids, boxes, 2, 9, "corrected")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_negative_logits_of_all_classes_keep_their_order() -> None:
    scores, ids, boxes = published.random_maps(2, 3, 4, 4, 3, seed=17)  # all three classes in every cell
    scores = -1000 - scores
    expected = published.batch_target(scores, ids, boxes, 2, 3, "corrected")
    found = dense_target(scores, ids, boxes, 2, 3, "corrected")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    target = map_target(scores, ids, boxes, side=2, num_classes=3, geometry="corrected")
    assert torch.equal(most_probable(target), expected.argmax(dim=2).flatten())


@pytest.mark.parametrize("sign", [1, -1])
def test_ids_are_exact_with_logits_of_any_sign(sign: int) -> None:
    scores, ids, boxes = published.random_maps(2, 3, 6, 6, 12, seed=19)
    scores, large = sign * scores.abs(), ids * 2_000_000  # beyond 2^24
    few = map_target(scores, ids, boxes, side=3, num_classes=12, geometry="corrected")
    many = map_target(scores, large, boxes, side=3, num_classes=24_000_000, geometry="corrected")
    assert torch.equal(many.ids, few.ids * 2_000_000)


@pytest.mark.parametrize("num_classes", [4, 9])
def test_the_most_probable_class_is_the_first_maximum(num_classes: int) -> None:
    scores, ids, boxes = published.random_maps(40, 2, 3, 3, num_classes, seed=14)
    # Here a class without an entry is the most probable, or in a full row the least negative one.
    scores[:20] = -scores[:20].abs()
    target = map_target(scores, ids, boxes, side=2, num_classes=num_classes, geometry="corrected")
    # In single precision, so that equal probabilities are equal numbers.
    expected = published.dense(target, num_classes).float().argmax(dim=1)
    assert torch.equal(most_probable(target), expected)


@pytest.mark.parametrize("side", [1, 14])
def test_memory_does_not_depend_on_the_number_of_classes(side: int) -> None:
    scores, ids, boxes = published.random_maps(4, 5, 18, 18, 1000, seed=15)
    target = partial(map_target, scores, ids, boxes, side=side, geometry="corrected")
    few, many = (most_allocated(partial(target, num_classes=count)) for count in (1000, 21841))
    window = 3 if side == 14 else 18  # of the map's 18 rows and columns
    # At most ten numbers for each of the five entries of a token's window.
    assert few == many < 10 * 4 * (4 * side * side * window * window * 5)


@pytest.mark.parametrize("reach", [None, 1.0, 1.3333, 4.7])  # None: boxes inside the map
@pytest.mark.parametrize(("size", "side"), [(18, 14), (18, 24), (9, 14), (14, 1), (3, 2), (3, 8)])
def test_the_weights_of_windows_sum_to_one_and_are_on_the_map(size, side, reach):
    generator = torch.Generator().manual_seed(21)
    largest = reach or 1.0
    extent = largest * (torch.rand(2000, generator=generator) * 0.95 + 0.05)
    start = torch.rand(2000, generator=generator)
    start = 3 * start - 1 if reach else start * (1 - extent)
    start[0], extent[0] = 0.0, largest
    cells, weights = roi_weights(start, extent, side=side, size=size, scale=size, reach=largest)
    assert cells.min() >= 0
    assert cells.max() < size
    # A box inside the map that is smaller than a cell is extended, possibly beyond the map.
    chosen = (start < 0) | (start + extent > 1) if reach else extent * size >= 1
    whole = weights.sum(dim=2)[chosen]
    torch.testing.assert_close(whole, torch.ones_like(whole))


BATCH, CLASSES, SIDE = 4, 12, 3
TEACHER = Objective(token_label=True, token_label_data="maps", cls_weight=0.75, dense_weight=0.5)
BOX = Box(top=0, left=1, height=2, width=2, grid=SIDE)


def labels_with_maps(seed: int = 1) -> Labels:
    scores, ids, boxes = published.random_maps(BATCH, 3, 6, 6, CLASSES, seed)
    classes = torch.randint(CLASSES, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return Labels(classes, LabelMaps(scores, ids, boxes))


def random_logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    class_logits = torch.randn(BATCH, CLASSES, generator=generator)
    token_logits = torch.randn(BATCH, SIDE * SIDE, CLASSES, generator=generator)
    return class_logits, token_logits


def teacher_targets(labels: Labels, settings: Objective) -> tuple[Tensor, Tensor]:
    """Return the smoothed teacher targets, (batch, classes) and (batch, tokens, classes)."""
    maps = (labels.maps.scores, labels.maps.ids, labels.maps.boxes)
    crop = published.batch_target(*maps, 1, CLASSES, settings.label_geometry).squeeze(1)
    tokens = published.batch_target(*maps, SIDE, CLASSES, settings.label_geometry)
    return published.smooth(crop, settings.smoothing), published.smooth(tokens, settings.smoothing)


def published_loss(
    class_logits: Tensor, token_logits: Tensor, class_target: Tensor, token_target: Tensor, lam: float
) -> LossParts:
    mixed = lam * class_target + (1 - lam) * class_target.flip(0)
    class_loss = published.cross_entropy(class_logits, mixed)
    token_loss = published.cross_entropy(token_logits.flatten(0, 1), token_target.flatten(0, 1))
    return LossParts(
        TEACHER.cls_weight * class_loss + TEACHER.dense_weight * token_loss, class_loss, token_loss
    )


def assert_equal_with_gradients(
    settings: Objective, labels: Labels, box: Box, class_target: Tensor, token_target: Tensor
) -> None:
    """Compare all three parts, and the total's gradients, with the published formula."""
    logits = [tensor.requires_grad_() for tensor in random_logits()]
    exact = [tensor.detach().double().requires_grad_() for tensor in logits]
    parts = build_loss(settings, CLASSES, SIDE)(*logits, labels, box)
    expected = published_loss(*exact, class_target, token_target, box.lam)
    for part, expected_part in zip(parts, expected, strict=True):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part.double(), expected_part, rtol=1e-5, atol=1e-5)
    parts.total.backward()
    expected.total.backward()
    for ours, theirs in zip(logits, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("geometry", get_args(Geometry))
@pytest.mark.parametrize("box", [BOX, NO_BOX])
def test_label_maps(geometry: Geometry, box: Box) -> None:
    settings = replace(TEACHER, label_geometry=geometry)
    labels = labels_with_maps()
    assert_equal_with_gradients(settings, labels, box, *teacher_targets(labels, settings))


def test_ground_truth_weighs_an_agreeing_teacher_by_half() -> None:
    settings = replace(TEACHER, ground_truth=True)
    labels = labels_with_maps()
    teacher, tokens = teacher_targets(labels, settings)
    # Two images whose teacher is right, two whose teacher is wrong.
    classes = teacher.argmax(dim=1)
    classes[2:] = (classes[2:] + 1) % CLASSES
    labels = replace(labels, classes=classes)
    truth = published.smooth(published.one_hot(classes, CLASSES), 0.0)
    truth = truth * (1 - settings.smoothing) + settings.smoothing / CLASSES
    weight = torch.tensor([0.5, 0.5, 0.9, 0.9], dtype=torch.float64).unsqueeze(1)
    assert_equal_with_gradients(settings, labels, BOX, weight * teacher + (1 - weight) * truth, tokens)


def test_without_maps_each_token_has_the_target_of_the_class() -> None:
    labels = labels_with_maps()
    one_hot = published.one_hot(labels.classes, CLASSES) * 0.9 + 0.1 / CLASSES
    tokens = one_hot.unsqueeze(1).expand(BATCH, SIDE * SIDE, CLASSES)
    settings = replace(TEACHER, token_label_data="")
    assert_equal_with_gradients(settings, Labels(labels.classes), BOX, one_hot, tokens)


@pytest.mark.parametrize("mix", [BOX, ImageMix(lam=0.3)])
def test_without_token_labels_the_loss_is_that_of_the_mixed_class(mix: Box | ImageMix) -> None:
    labels = labels_with_maps()
    class_logits, token_logits = (tensor.requires_grad_() for tensor in random_logits())
    settings = Objective(cls_weight=0.75)
    parts = build_loss(settings, CLASSES, SIDE)(class_logits, token_logits, Labels(labels.classes), mix)
    target = published.one_hot(labels.classes, CLASSES) * 0.9 + 0.1 / CLASSES
    mixed = mix.lam * target + (1 - mix.lam) * target.flip(0)
    expected = published.cross_entropy(class_logits.detach().double(), mixed)
    torch.testing.assert_close(parts.class_loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.total, 0.75 * parts.class_loss)
    assert parts.token_loss == 0
    parts.total.backward()
    assert token_logits.grad is None
    assert class_logits.grad is not None


def test_logits_that_are_not_a_leaf_are_overwritten_by_their_gradient() -> None:
    """No other tensor has an element for each token and class."""
    num_classes, side = 5000, 4
    labels = labels_with_maps()
    generator = torch.Generator().manual_seed(2)
    leaf = torch.randn(BATCH, side * side, num_classes, generator=generator).requires_grad_()
    class_logits = torch.zeros(BATCH, num_classes, requires_grad=True)
    loss = build_loss(replace(TEACHER, ground_truth=True), num_classes, side)
    loss(class_logits, leaf, labels, BOX).total.backward()
    assert leaf.grad is not None

    grads: list[Tensor] = []
    given = leaf.detach().clone().requires_grad_() * 1.0

    def loss_and_gradient() -> None:
        total = loss(class_logits, given, labels, BOX).total
        grads.extend(torch.autograd.grad(total, given))

    assert most_allocated(loss_and_gradient) < given.numel() * given.element_size() / 4
    torch.testing.assert_close(grads[0], leaf.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("settings", [Objective(token_label=True), TEACHER], ids=["class", "teacher"])
def test_without_a_weight_for_tokens_no_token_logits_are_needed(settings: Objective) -> None:
    """The network then has no auxiliary head."""
    labels, (class_logits, token_logits) = labels_with_maps(), random_logits()
    expected = build_loss(settings, CLASSES, SIDE)(class_logits, token_logits, labels, BOX)
    loss = build_loss(replace(settings, dense_weight=0.0), CLASSES, SIDE)
    found = loss(class_logits, token_logits[:, :0], labels, BOX)
    torch.testing.assert_close(found.class_loss, expected.class_loss)
    torch.testing.assert_close(found.total, settings.cls_weight * expected.class_loss)
    assert float(found.token_loss) == 0.0


def test_the_binary_cross_entropy_with_label_maps() -> None:
    settings, labels = replace(TEACHER, loss="bce"), labels_with_maps()
    class_logits, token_logits = random_logits()
    class_target, token_target = teacher_targets(labels, settings)
    mixed = BOX.lam * class_target + (1 - BOX.lam) * class_target.flip(0)
    parts = build_loss(settings, CLASSES, SIDE)(class_logits, token_logits, labels, BOX)
    class_loss = binary_cross_entropy_with_logits(class_logits.double(), mixed)
    token_loss = binary_cross_entropy_with_logits(token_logits.double(), token_target)
    total = settings.cls_weight * class_loss + settings.dense_weight * token_loss
    for part, expected in zip(parts, (total, class_loss, token_loss), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-6)
