"""What an evaluation asks besides top-1: ReaL's labels, ImageNet-V2's folders, and each class by itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from coded_images import smooth, write_images

from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.loader import NO_CLASS
from horovod_volo.evaluation.imagenet_real import read_real, score_real
from horovod_volo.evaluation.imagenet_v2 import list_numbered, numbered_catalog
from horovod_volo.evaluation.per_class import ClassScore, class_scores

CLASSES = 6


def named(number: int, more: str = "") -> str:
    return f"ILSVRC2012_val_{number:08d}{more}.JPEG"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Return images 4, 1, 3 in the catalog's order."""
    names = [f"val/a/{named(4)}", f"val/b/{named(1)}", f"val/b/{named(3, '_n01440764')}"]
    write_images(tmp_path, {name: smooth(20, 20, seed=0) for name in names})
    return build_catalog(str(tmp_path), "val", None)


def written(folder: Path, content: object) -> str:
    file = folder / "real.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_an_image_has_the_list_of_its_number(catalog: Catalog, tmp_path: Path) -> None:
    real = read_real(written(tmp_path, [[5], [1], [2, 3], []]), catalog, CLASSES)
    assert [catalog.name(index)[-9:-5] for index in range(2)] == ["0004", "0001"]
    assert real == [frozenset(), {5}, {2, 3}]


def test_images_without_a_class_or_damaged_are_left_out_of_real() -> None:
    real = [frozenset(), frozenset({5}), frozenset({2, 3}), frozenset({1}), frozenset({4})]
    score = score_real(real, np.array([0, 5, 3, 0, NO_CLASS]))
    assert score == (2, 3)
    assert score.accuracy == pytest.approx(66.6667)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([[1], [2], [3]], f"has 3 lists, but a/{named(4)} is image 4. Give ReaL's whole real.json"),
        ([[], [1], [], []], "has no class for any image of"),
        ([[6], [], [], []], "has class 6, the network knows 6 classes. --real is for"),
        ([[True], [], [], []], "not a list of lists of class numbers"),
        ([["n01"], [], [], []], "not a list of lists of class numbers"),
        ([[-1], [], [], []], "not a list of lists of class numbers"),
        ({"1": [2]}, "not a list of lists of class numbers"),
        ("[[1], ", "is no JSON: .* Give ReaL's real.json to --real"),
    ],
)
def test_a_file_that_is_not_reals(catalog: Catalog, tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_real(written(tmp_path, content), catalog, CLASSES)


@pytest.mark.parametrize("name", ["n01440764_10026.JPEG", "ILSVRC2012_val_00000000.JPEG", named(1, "0")])
def test_a_name_without_a_number(tmp_path: Path, name: str) -> None:
    write_images(tmp_path, {f"val/a/{name}": smooth(20, 20, seed=0)})
    catalog = build_catalog(str(tmp_path), "val", None)
    with pytest.raises(UserError, match=f"a/{name} carries no number of a validation image"):
        read_real(written(tmp_path, [[1]] * 4), catalog, CLASSES)


def test_a_real_file_that_is_not_there(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read: No such file"):
        read_real(str(tmp_path / "nowhere.json"), catalog, CLASSES)


def test_numbered_folders_are_numbered_as_they_say(tmp_path: Path) -> None:
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
    ("folders", "said"),
    [
        (["0", "1", "n01440764"], "has the folders n01440764. With --v2 it must"),
        (["train", "val"], "has the folders train, val. With --v2 it must"),
        ([], "has no folders. With --v2 it must"),
        (["0", "2"], "has 2 class folders, but none for class 1. "),
        (["1", "2", "3"], "none for class 0. "),
        (["0", "1", "01"], "none for class 2. "),
        (["0", "²"], "has the folders ²"),
        (["0", "1"], "no images in .*0, .*1. Add images"),
    ],
)
def test_folders_that_are_not_numbered(tmp_path: Path, folders: list[str], said: str) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=said):
        list_numbered(str(tmp_path))
    with pytest.raises(UserError, match=r"there is no data folder .*nowhere"):
        list_numbered(str(tmp_path / "nowhere"))


def slow_scores(classes: list[str], targets: list[int], taken: list[int]) -> dict[str, ClassScore]:
    """Count class by class and image by image."""
    found = {}
    for number, name in enumerate(classes):
        guesses = [
            guess for target, guess in zip(targets, taken, strict=True) if target == number and guess >= 0
        ]
        wrong = Counter(guess for guess in guesses if guess != number)
        most = max(wrong.values(), default=0)
        instead = min((guess for guess, count in wrong.items() if count == most), default=None)
        found[name] = ClassScore(
            name,
            len(guesses),
            guesses.count(number),
            "" if instead is None else classes[instead],
            most,
        )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_classes_are_scored_as_a_slow_loop_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    classes = [f"class {number}" for number in range(random.integers(2, 9))]
    targets = random.integers(0, len(classes), size=60)
    taken = random.integers(NO_CLASS, len(classes), size=60)
    scores = class_scores(classes, targets, taken)
    assert {score.name: score for score in scores} == slow_scores(classes, targets.tolist(), taken.tolist())
    shares = [score.right / score.images for score in scores if score.images]
    assert shares == sorted(shares)


def test_a_class_without_images_comes_last() -> None:
    scores = class_scores("abc", np.array([0, 1, 2]), np.array([NO_CLASS, 1, 1]))
    assert [score.name for score in scores] == ["c", "b", "a"]
    assert scores[0] == ("c", 1, 0, "b", 1)
    assert scores[-1] == ("a", 0, 0, "", 0)
