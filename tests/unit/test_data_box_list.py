"""Annotations in COCO's form: their oddities, the mapped arrays, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from box_samples import CATEGORIES, annotation, image, write_coco

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.dense import annotations as annotations_module
from horovod_volo.dense.box_list import BoxList, find_boxes, list_boxes, open_boxes, read_sized

IMAGES = [image(70, 64, 48), image(7, 50, 60), image(9, 40, 40), image(8, 30, 30)]
BOXES = [
    annotation(7, (10.5, 20, 20, 30.25)),
    annotation(70, (60, 40, 10, 20), 90),  # sticks out
    annotation(7, (0, 0, 50, 60), 18, iscrowd=1, area=1234.5),
    annotation(9, (5, 5, 0, 10)),  # no width
    annotation(7, (1, 2, 3, 4), 18),
    annotation(8, (0, 0, 30, 30), iscrowd=1),
]


def listed(root: Path, cache: Path | None = None, split: Any = "train") -> BoxList:
    return list_boxes(find_boxes(root, split), cache)


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    write_coco(tmp_path / "coco", IMAGES, BOXES)
    return tmp_path / "coco"


def test_images_ascend_with_their_ids_and_classes_with_their_categories(coco: Path) -> None:
    images = listed(coco)
    arrays = images.annotations.arrays
    assert arrays.image_ids.tolist() == [7, 8, 9, 70]
    assert images.classes == ("person", "dog", "toothbrush")
    assert images.annotations.category_ids == (1, 18, 90)
    assert [images.name(index) for index in range(4)] == [f"{number:012}.png" for number in (7, 8, 9, 70)]
    assert images.size(0) == (60, 50)
    rows = images.rows(0)
    assert arrays.boxes[rows].tolist() == [[10.5, 20, 30.5, 50.25], [0, 0, 50, 60], [1, 2, 4, 6]]
    assert arrays.classes[rows].tolist() == [0, 1, 1]
    assert arrays.crowd[rows].tolist() == [False, True, False]
    assert arrays.areas[rows].tolist() == [605, 1234.5, 12]


def test_crowds_and_slivers_are_not_learned_and_boxes_are_cut_to_the_image(coco: Path) -> None:
    images = listed(coco)
    assert images.boxes_to_learn(0).classes.tolist() == [0, 1]
    assert images.boxes_to_learn(3).boxes.tolist() == [[60, 40, 64, 48]]
    assert [len(images.boxes_to_learn(index).boxes) for index in range(4)] == [2, 0, 0, 1]
    learned = images.without_empty()
    assert [learned.name(index) for index in range(len(learned))] == [images.name(0), images.name(3)]
    assert learned.boxes_to_learn(1).boxes.tolist() == [[60, 40, 64, 48]]
    assert learned.digest != images.digest


def test_the_arrays_are_read_from_json_once(
    coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = listed(coco, cache)
    assert isinstance(first.annotations.arrays.boxes, np.memmap)
    assert first.digest == listed(coco).digest
    folder = first.annotations.folder
    assert folder is not None
    other = open_boxes(first.files, folder)
    assert (other.digest, other.classes) == (first.digest, first.classes)
    (folder / "classes.npy").write_bytes((folder / "classes.npy").read_bytes()[:-2] + b"\1\0")  # damaged
    assert listed(coco, cache).annotations.arrays.classes.tolist() == [0, 1, 1, 0, 0, 2]
    monkeypatch.setattr(annotations_module, "parse_annotations", lambda path: pytest.fail(str(path)))
    assert listed(coco, cache).digest == first.digest


def test_what_another_run_has_mapped_is_not_deleted(
    coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run that shares the folder may have the arrays mapped, or be about to map them."""
    cache = tmp_path / "cache"
    parse = annotations_module.parse_annotations
    mapped = dict[int, Path]()

    def parse_while_another_run_does(path: Path) -> annotations_module.Annotations:
        monkeypatch.setattr(annotations_module, "parse_annotations", parse)
        assert isinstance(listed(coco, cache).annotations.arrays.boxes, np.memmap)
        mapped.update(files())
        return parse(path)

    def files() -> dict[int, Path]:
        return {path.stat().st_ino: path for path in cache.rglob("*.npy")}

    monkeypatch.setattr(annotations_module, "parse_annotations", parse_while_another_run_does)
    images = listed(coco, cache)
    assert files() == mapped
    folder = images.annotations.folder
    assert folder is not None
    (folder / "classes.npy").write_bytes(b"")  # damaged, as after a power failure
    assert listed(coco, cache).digest == images.digest
    assert files().keys() > mapped.keys()
    assert not list(cache.glob("*partial*"))


def test_own_boxes_lie_beside_the_images(tmp_path: Path) -> None:
    file = write_coco(tmp_path, IMAGES, BOXES, "val")
    (tmp_path / "boxes").mkdir()
    file.rename(tmp_path / "boxes" / "val.json")
    (tmp_path / "images").mkdir()
    (tmp_path / "val").rename(tmp_path / "images" / "val")
    images = listed(tmp_path, split="val")
    assert len(images) == 4
    assert read_sized(images, 0)[1] == (60, 50)
    with pytest.raises(UserError, match="has no boxes of the train split"):
        listed(tmp_path)


def test_an_image_of_another_size_is_damaged(coco: Path) -> None:
    path = coco / "train2017" / "000000000009.png"
    (coco / "train2017" / "000000000008.png").rename(path)
    write_coco(coco / "other", IMAGES, BOXES)
    images = BoxList(find_boxes(coco, "train"), listed(coco / "other").annotations, np.arange(4))
    with pytest.raises(BadSampleError, match="has 30 x 30 pixels, its annotation 40 x 40"):
        read_sized(images, 2)
    with pytest.raises(BadSampleError, match="cannot be read: No such file"):
        read_sized(images, 1)
    (coco / "train2017" / "000000000008.png").symlink_to("gone")  # a link to nothing is a missing image
    with pytest.raises(UserError, match=r"1 of 4 images of .* are not in .*; the first: 000000000008\.png"):
        listed(coco)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([], "is not in COCO's form"),
        ({"annotations": None}, "is not in COCO's form .KeyError: 'annotations'."),
        ({"images": [{"id": 1}]}, "it needs images .id, file_name, height, width."),
        ({"images": [], "annotations": []}, "lists no images"),
        ({"categories": []}, "names 0 categories"),
        ({"categories": [*CATEGORIES, CATEGORIES[0]]}, "names 4 categories"),
        ({"images": [*IMAGES, IMAGES[0]]}, "lists an image twice"),
        ({"annotations": [annotation(5, (0, 0, 9, 9))]}, "is of an image that is not listed: image 5"),
        ({"annotations": [annotation(7, (0, 0, 9, 9), 2)]}, "is of a category that is not listed"),
        ({"annotations": [annotation(7, (0, 0, -9, 9))]}, "1 of 1 boxes cannot be used; the first has no"),
        ({"annotations": [annotation(7, (0, 0, 9, 9), bbox=[1, 2, 3])]}, "is not in COCO's form"),
        ({"images": [*IMAGES, image(3, 9, 9, "gone.jpg")]}, "1 of 5 images of .* the first: gone.jpg"),
    ],
)
def test_a_file_that_is_wrong_is_refused(coco: Path, content: Any, message: str) -> None:
    path = coco / "annotations" / "instances_train2017.json"
    whole = {"images": IMAGES, "annotations": BOXES, "categories": list(CATEGORIES)}
    complete = whole | content if isinstance(content, dict) else content
    if isinstance(complete, dict):
        complete = {name: value for name, value in complete.items() if value is not None}
    text = complete if isinstance(complete, str) else json.dumps(complete)
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        listed(coco)


def test_a_folder_without_boxes_or_images_is_refused(coco: Path) -> None:
    with pytest.raises(UserError, match="There is no folder"):
        find_boxes(coco / "nowhere", "train")
    (coco / "annotations" / "instances_train2014.json").write_text("{}")
    with pytest.raises(UserError, match="has 2 files instances_train"):
        find_boxes(coco, "train")
    (coco / "annotations" / "instances_train2017.json").unlink()
    with pytest.raises(UserError, match=r"there is no .*images.train2014"):
        find_boxes(coco, "train")
