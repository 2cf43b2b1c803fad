"""The worst classes of an evaluation: against a slow count, and over batches and ranks."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from horovod_volo.bench.synthetic import SyntheticRun, bench_config, catalog_without_files, learner_of
from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.engine import classification
from horovod_volo.engine.accuracy import WORST_CLASSES, WRONG_IMAGES, EvalCounts, ImageScores, find_confusions
from tests.gpu.synchronisation import RefuseSynchronisation


@dataclass
class NumberedImages:
    """Images that are only numbers."""

    classes: tuple[str, ...]
    targets: NDArray[np.int32]
    digest: str = "digest"

    def name(self, index: int) -> str:
        return f"{self.classes[self.targets[index]]}/{index}"

    def location(self, index: int) -> str:
        return f"/data/{index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        raise NotImplementedError


def drawn_case(seed: int) -> tuple[NumberedImages, NDArray[np.int64], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    classes = tuple(f"class {number}" for number in range(random.integers(2, 40)))
    targets = random.integers(0, len(classes), size=300).astype(np.int32)
    predictions = np.where(
        random.random(300) < 0.5, targets, random.integers(NO_CLASS, len(classes), size=300)
    )
    # Few values, so that many are equal.
    return NumberedImages(classes, targets), predictions, random.integers(0, 20, 300).astype(np.float32) / 20


@pytest.mark.parametrize("seed", range(10))
def test_confusions_equal_a_slow_count(seed: int) -> None:
    images, predictions, probabilities = drawn_case(seed)
    found = find_confusions(images, predictions, probabilities)
    seen = [index for index in range(300) if predictions[index] != NO_CLASS]
    wrong = [index for index in seen if predictions[index] != images.targets[index]]
    assert found["images"] == len(seen)
    assert found["top1"] == pytest.approx(100 * (1 - len(wrong) / len(seen)))
    accuracies = {}
    for number, name in enumerate(images.classes):
        own = [index for index in seen if images.targets[index] == number]
        if any(index in wrong for index in own):
            accuracies[name] = 1 - sum(index in wrong for index in own) / len(own)
    names = sorted(accuracies, key=lambda name: accuracies[name])[:WORST_CLASSES]
    assert sorted(accuracies[row["name"]] for row in found["worst"]) == sorted(accuracies[n] for n in names)
    for row in found["worst"]:
        number = images.classes.index(row["name"])
        own = [index for index in wrong if images.targets[index] == number]
        own.sort(key=lambda index: (-probabilities[index], index))
        assert [each["index"] for each in row["wrong"]] == own[:WRONG_IMAGES]
        for each in row["wrong"]:
            index = each["index"]
            assert each["taken_for"] == images.classes[predictions[index]]
            assert each["location"] == f"/data/{index}"
            assert each["probability"] == pytest.approx(probabilities[index])
    assert json.loads(json.dumps(found)) == found


def batch_of(indices: list[int], classes: NDArray[Any]) -> EvalBatch:
    return EvalBatch(torch.empty(0), torch.from_numpy(classes[indices].astype(np.int64)), np.array(indices))


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_predictions_are_collected_by_image(batch: int) -> None:
    catalog, random = catalog_without_files(300, 10), torch.Generator().manual_seed(1)
    logits = torch.randn(300, 10, generator=random)
    classes = torch.randint(10, (300,), generator=random)
    classes[::50] = NO_CLASS  # damaged
    scores = ImageScores(torch.device("cpu"))
    for indices in torch.arange(299, -1, -1).split(batch):
        with RefuseSynchronisation():  # the host does not wait for the device
            scores.add(EvalBatch(torch.empty(0), classes[indices], indices.numpy()), logits[indices])
    counts, predictions, probabilities = scores.gather(catalog, World.single())
    seen, ranks = classes != NO_CLASS, logits.argsort(dim=1, descending=True)
    correct = (ranks == classes[:, None]).cumsum(dim=1)
    assert counts._replace(loss_sum=0) == (correct[:, 0].sum(), correct[:, 4].sum(), 0, 294, 6)
    loss = torch.nn.functional.cross_entropy(logits[seen], classes[seen], reduction="sum")
    assert counts.loss_sum == pytest.approx(float(loss))
    assert predictions.tolist() == torch.where(seen, ranks[:, 0], NO_CLASS).tolist()
    assert probabilities.tolist() == logits.softmax(dim=1).amax(dim=1).tolist()


def test_the_better_weights_of_a_step_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([50, 75, 50, 0])
    counts = EvalCounts(0, 0, 0.0, 2, 0)
    monkeypatch.setattr(ImageScores, "gather", lambda *_: (counts, None, None))
    monkeypatch.setattr(classification, "find_confusions", lambda *_: {"top1": next(scores)})
    with closing(SyntheticRun(bench_config(model="volo_demo", img_size=32, batch_size=2))) as run:
        learner = learner_of(run.context)
        assert learner.files(0) == {}
        for evaluations, step, best in ((3, 5, 75), (1, 6, 0)):
            for _ in range(evaluations):
                learner.evaluate(run.context.model, lambda _: None)
            assert json.loads(learner.files(step)["confusions.json"]) == {"step": step, "top1": best}
