"""ImageNet-ReaL and -V2, accuracy per class, the worst classes, and the images that a run held out."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from coded_images import smooth, write_images
from numpy.typing import NDArray

from horovod_volo.bench.synthetic import SyntheticRun, bench_config, catalog_without_files, learner_of
from horovod_volo.cluster.world import World
from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import dump, with_absolute_folder
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.engine import accuracy, classification
from horovod_volo.evaluation.accuracy import held_out_by
from horovod_volo.evaluation.imagenet import count_real, list_numbered, numbered_catalog, read_real
from tests.gpu.synchronisation import RefuseSynchronisation

CLASSES = 6


def file_name(number: int, suffix: str = "") -> str:
    return f"ILSVRC2012_val_{number:08d}{suffix}.JPEG"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Return a catalog of the validation images 4, 1 and 3, in this order."""
    names = [f"val/a/{file_name(4)}", f"val/b/{file_name(1)}", f"val/b/{file_name(3, '_n01440764')}"]
    write_images(tmp_path, {name: smooth(20, 20, seed=0) for name in names})
    return build_catalog(str(tmp_path), "val", None)


def write_real(folder: Path, content: object) -> str:
    file = folder / "real.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_classes_are_found_by_the_number_in_the_name(catalog: Catalog, tmp_path: Path) -> None:
    real = read_real(write_real(tmp_path, [[5], [1], [2, 3], []]), catalog, CLASSES)
    assert [catalog.name(index)[-9:-5] for index in range(2)] == ["0004", "0001"]
    assert real == [frozenset(), {5}, {2, 3}]


def test_an_evaluation_takes_the_images_that_the_run_held_out(tmp_path, monkeypatch):
    data, run = tmp_path / "data", tmp_path / "run"
    for folder in (data, run, tmp_path / "other"):
        folder.mkdir()
    flags = ["--val-share", "0.2", "--val-split", "dev", "--seed", "7"]
    monkeypatch.chdir(tmp_path)
    (run / "resolved.toml").write_text(dump(with_absolute_folder(parse(["data", *flags]).config)))
    monkeypatch.chdir("/")
    assert held_out_by(str(run), f"{tmp_path}/other/../data") == HeldOut("dev", 0.2, 7)
    assert held_out_by(str(run), str(tmp_path / "other")) == HeldOut()
    assert held_out_by("timm:volo_d1_224.sail_in1k", str(data)) == HeldOut()


def test_images_without_classes_and_damaged_images_do_not_count() -> None:
    real = [frozenset(), frozenset({5}), frozenset({2, 3}), frozenset({1}), frozenset({4})]
    result = count_real(real, np.array([0, 5, 3, 0, NO_CLASS]))
    assert result == {"accuracy": pytest.approx(66.6667), "right": 2, "images": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[1], [2], [3]], f"has 3 lists, but a/{file_name(4)} is image 4"),
        ([[], [1], [], []], "has no class for any image of"),
        ([[6], [], [], []], "has class 6, but the network has 6 classes"),
        *((rows, "not a list of lists") for rows in ([[True], []], [["n01"], []], [[-1], []], {"1": [2]})),
        ("[[1], ", "cannot be read"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_file_that_is_not_real_json_is_refused(catalog, tmp_path, content, message):
    file = str(tmp_path / "nowhere.json") if content is None else write_real(tmp_path, content)
    with pytest.raises(UserError, match=message):
        read_real(file, catalog, CLASSES)


@pytest.mark.parametrize("name", ["n01440764_10026.JPEG", "ILSVRC2012_val_00000000.JPEG", file_name(1, "0")])
def test_an_image_without_a_number_is_refused(tmp_path: Path, name: str) -> None:
    write_images(tmp_path, {f"val/a/{name}": smooth(20, 20, seed=0)})
    catalog = build_catalog(str(tmp_path), "val", None)
    with pytest.raises(UserError, match=f"a/{name} has no number of a validation image"):
        read_real(write_real(tmp_path, [[1]] * 4), catalog, CLASSES)


def test_a_numbered_folder_is_the_class_of_that_number(tmp_path: Path) -> None:
    names = {f"{number}/{number}.png": smooth(20, 20, seed=number) for number in range(12)}
    write_images(tmp_path, names | {"3/another.png": smooth(20, 20, seed=3)})
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "readme.txt").touch()
    catalog = numbered_catalog(str(tmp_path), World.single())
    assert catalog.classes == tuple(map(str, range(12)))
    folders = [int(catalog.name(index).partition("/")[0]) for index in range(len(catalog))]
    assert folders == catalog.targets.tolist() == [0, 1, 2, 3, 3, *range(4, 12)]
    for index in range(len(catalog)):
        assert catalog.read(index).tobytes() == (tmp_path / catalog.name(index)).read_bytes()


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["0", "1", "n01440764"], "--v2 needs: additional or missing are 2, n01440764"),
        ([], "missing are 0"),
        (["0", "2"], "missing are 1, 2"),
        (["0", "1", "01"], "missing are 01, 2"),
        (["0", "²"], "missing are 1, ²"),
        (["0", "1"], "no images in .*0, .*1. Add images"),
        (None, "No such file"),
    ],
)
def test_folders_that_are_not_numbered_are_refused(tmp_path, folders, message):
    for name in folders or []:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=message):
        list_numbered(str(tmp_path if folders is not None else tmp_path / "nowhere"))


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


def drawn_case(seed: int) -> tuple[NumberedImages, NDArray[np.int64], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    classes = tuple(f"class {number}" for number in range(random.integers(2, 40)))
    targets = random.integers(0, len(classes), size=100).astype(np.int32)
    others = random.integers(NO_CLASS, len(classes), size=100)
    predictions = np.where(random.random(100) < 0.5, targets, others)
    # Few values, so that many are equal.
    return NumberedImages(classes, targets), predictions, random.integers(0, 20, 100).astype(np.float32) / 20


@pytest.mark.parametrize("seed", range(20))
def test_class_results_and_confusions_equal_those_of_a_simple_loop(seed: int) -> None:
    images, predictions, probabilities = drawn_case(seed)
    classes, targets = images.classes, images.targets
    results = accuracy.class_results(classes, targets, predictions)
    assert sorted(result.name for result in results) == sorted(classes)
    for name, count, right, mistaken_for, mistaken in results:
        number = classes.index(name)
        own = [prediction for prediction in predictions[targets == number].tolist() if prediction >= 0]
        wrong = Counter(prediction for prediction in own if prediction != number)
        most = max(wrong.values(), default=0)
        expected = next((classes[each] for each in sorted(wrong) if wrong[each] == most), "")
        assert (count, right, mistaken_for, mistaken) == (len(own), own.count(number), expected, most)
    accuracies = [result.right / result.images if result.images else np.inf for result in results]
    assert accuracies == sorted(accuracies)

    found = accuracy.find_confusions(images, predictions, probabilities)
    assert found["images"] == sum(result.images for result in results)
    assert found["top1"] == 100 * sum(result.right for result in results) / found["images"]
    worst = [result for result in results if result.right < result.images][: accuracy.WORST_CLASSES]
    for row, result in zip(found["worst"], worst, strict=True):
        assert row.items() >= result._asdict().items()
        is_wrong = (predictions != NO_CLASS) & (predictions != targets)
        own = np.flatnonzero(is_wrong & (targets == classes.index(row["name"]))).tolist()
        own.sort(key=lambda index: (-probabilities[index], index))
        assert [each["index"] for each in row["wrong"]] == own[: accuracy.WRONG_IMAGES]
        for each in row["wrong"]:
            index = each["index"]
            assert each["taken_for"] == classes[predictions[index]]
            assert each["location"] == f"/data/{index}"
            assert each["probability"] == pytest.approx(probabilities[index])
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_predictions_are_collected_by_image(batch: int) -> None:
    catalog, random = catalog_without_files(300, 10), torch.Generator().manual_seed(1)
    logits = torch.randn(300, 10, generator=random)
    classes = torch.randint(10, (300,), generator=random)
    classes[::50] = NO_CLASS  # damaged
    scores = accuracy.ImageScores(torch.device("cpu"))
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
    counts = accuracy.EvalCounts(0, 0, 0.0, 2, 0)
    monkeypatch.setattr(accuracy.ImageScores, "gather", lambda *_: (counts, None, None))
    monkeypatch.setattr(classification, "find_confusions", lambda *_: {"top1": next(scores)})
    with closing(SyntheticRun(bench_config(model="volo_demo", img_size=32, batch_size=2))) as run:
        learner = learner_of(run.context)
        assert learner.files(0) == {}
        for evaluations, step, best in ((3, 5, 75), (1, 6, 0)):
            for _ in range(evaluations):
                learner.evaluate(run.context.model, lambda _: None)
            assert json.loads(learner.files(step)["confusions.json"]) == {"step": step, "top1": best}
