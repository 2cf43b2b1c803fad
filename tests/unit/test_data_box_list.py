"""Annotations in COCO's form: their oddities, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from box_samples import CATEGORIES, annotation, image, write_coco

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.dense.box_list import BoxList, find_boxes, list_boxes, read_sized

IMAGES = [image(70, 64, 48), image(7, 50, 60), image(9, 40, 40), image(8, 30, 30)]
BOXES = [
    annotation(7, (10.5, 20, 20, 30.25)),
    annotation(70, (60, 40, 10, 20), 90),  # sticks out
    annotation(7, (0, 0, 50, 60), 18, iscrowd=1, area=1234.5),
    annotation(9, (5, 5, 0, 10)),  # no width
    annotation(7, (1, 2, 3, 4), 18),
    annotation(8, (0, 0, 30, 30), iscrowd=1),
]


def listed(root: Path, split: Any = "train") -> BoxList:
    return list_boxes(root, split)


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    write_coco(tmp_path / "coco", IMAGES, BOXES)
    return tmp_path / "coco"


def test_images_ascend_with_their_ids_and_classes_with_their_categories(coco: Path) -> None:
    images = listed(coco)
    arrays = images.annotations
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
    assert learned.digest != images.digest == listed(coco).digest


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
