"""Lists of images with masks or boxes, with the oddities of real ones: each is read, or explained."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from box_samples import CATEGORIES, annotation, image, write_coco
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.core.batch import IGNORED
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.split_folder import paths_below
from horovod_volo.dense.box_list import BoxList, find_boxes, list_boxes, read_sized
from horovod_volo.dense.scene_list import find_layout, list_scenes

UNPRIVILEGED = 65534  # the user nobody
MASK = np.array([[0, 1, 2], [150, 255, 3]], dtype=np.uint8)


def write(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def picture() -> NDArray[np.uint8]:
    return np.zeros((2, 3, 3), dtype=np.uint8)


def test_ade20k_counts_classes_from_one(tmp_path: Path) -> None:
    for split, name in (("training", "ADE_train_00000001"), ("validation", "ADE_val_00000001")):
        write(tmp_path / "images" / split / f"{name}.jpg", picture())
        write(tmp_path / "annotations" / split / f"{name}.png", MASK)
    layout = find_layout(tmp_path)
    scenes = list_scenes(tmp_path, layout, "val")
    assert (layout.name, len(scenes.classes), scenes.names) == ("ade20k", 150, ("ADE_val_00000001.jpg",))
    assert scenes.read_mask(0, (2, 3)).tolist() == [[IGNORED, 0, 1], [149, IGNORED, 2]]


def test_cityscapes_has_folders_of_cities(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for city in ("aachen", "bochum"):
            name = f"{city}_000000_000019"
            write(tmp_path / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", picture())
            labels = np.minimum(MASK, 18) + (MASK == IGNORED) * np.uint8(237)
            write(tmp_path / "gtFine" / split / city / f"{name}_gtFine_labelTrainIds.png", labels)
            write(tmp_path / "gtFine" / split / city / f"{name}_gtFine_color.png", picture())
    scenes = list_scenes(tmp_path, find_layout(tmp_path), "train")
    assert len(scenes) == 2
    assert len(scenes.classes) == 19
    assert scenes.read_mask(1, (2, 3)).tolist() == [[0, 1, 2], [18, IGNORED, 3]]


def plain(folder: Path) -> Path:
    """Write one image and mask of three classes for each split."""
    for split in ("train", "val"):
        write(folder / "images" / split / "one.png", picture())
        write(folder / "masks" / split / "one.png", np.minimum(MASK, 2))
    (folder / "classes.txt").write_text("ground\nsky\ntree\n")
    return folder


def test_ones_own_folder(tmp_path: Path) -> None:
    scenes = list_scenes(plain(tmp_path), find_layout(tmp_path), "train")
    assert tuple(scenes.classes) == ("ground", "sky", "tree")
    assert scenes.read_mask(0, (2, 3)).tolist() == [[0, 1, 2], [2, 2, 2]]
    other = list_scenes(tmp_path, find_layout(tmp_path), "val")
    assert scenes.digest == other.digest
    write(tmp_path / "images" / "val" / "two.png", picture())
    write(tmp_path / "masks" / "val" / "two.png", np.minimum(MASK, 2))
    assert list_scenes(tmp_path, find_layout(tmp_path), "val").digest != other.digest


def test_linked_folders_are_listed_and_links_to_nothing_are_refused(tmp_path: Path) -> None:
    plain(tmp_path)
    for kind, pixels in (("images", picture()), ("masks", np.minimum(MASK, 2))):
        write(tmp_path / "other" / kind / "deep" / "two.png", pixels)
        (tmp_path / kind / "train" / "ulm").symlink_to(tmp_path / "other" / kind)
    for link, to in {"current": ".", "all": "../..", "ulm/above": tmp_path / "images" / "train"}.items():
        (tmp_path / "images" / "train" / link).symlink_to(to)  # they lead up, and are not followed
    scenes = list_scenes(tmp_path, find_layout(tmp_path), "train")
    assert scenes.names == ("one.png", "ulm/deep/two.png")
    assert scenes.read_mask(1, (2, 3)).tolist() == [[0, 1, 2], [2, 2, 2]]
    mask, image = tmp_path / "masks" / "train" / "three.png", tmp_path / "images" / "train" / "three.png"
    mask.symlink_to(tmp_path / "gone")
    write(image, picture())
    with pytest.raises(UserError, match=r"1 of 3 images .* have no mask; .*masks/train/three\.png"):
        list_scenes(tmp_path, find_layout(tmp_path), "train")
    for target in ("gone", image.name):  # or to itself
        image.unlink()
        image.symlink_to(target)
        with pytest.raises(UserError, match=r"1 of 3 entries .* are links to nothing, the first: three\."):
            list_scenes(tmp_path, find_layout(tmp_path), "train")


def test_a_folder_that_permission_denies() -> None:
    """It is an error for training, and named by who takes what else there is."""
    with tempfile.TemporaryDirectory() as directory:  # other users cannot enter pytest's own folders
        root = plain(Path(directory))
        root.chmod(0o755)
        train = root / "images" / "train"
        write(train / "ulm" / "two.png", picture())
        (train / "three.png").symlink_to("ulm/two.png")
        (train / "four").mkdir()
        (train / "ulm").chmod(0)
        denied: list[str] = []
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(UNPRIVILEGED)
            with pytest.raises(UserError, match=r"train/(ulm|three\.png) cannot be listed"):
                list_scenes(root, find_layout(root), "train")
            assert set(paths_below(train, denied)) == {"one.png", "ulm", "four"}
        finally:
            if is_root:
                os.seteuid(0)
            (train / "ulm").chmod(0o755)
        unlisted = (train / "three.png", train / "ulm")
        assert sorted(denied) == [f"{path} cannot be listed: Permission denied" for path in unlisted]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "is not a complete mask"),
        (lambda path: path.write_bytes(b"no image"), "is not a complete mask"),
        (lambda path: write(path, picture()), "its mode is RGB, not 8 bits"),
        (lambda path: write(path, MASK.T.copy()), "has 2 x 3 pixels, its image 3 x 2"),
        (lambda path: write(path, np.minimum(MASK, 3)), "has label 3, but there are 3 classes"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
    ],
)
def test_a_damaged_mask_is_named(tmp_path: Path, damage: object, message: str) -> None:
    scenes = list_scenes(plain(tmp_path), find_layout(tmp_path), "train")
    damage(tmp_path / "masks" / "train" / "one.png")  # type: ignore[operator]
    with pytest.raises(BadSampleError, match=message) as raised:
        scenes.read_mask(0, (2, 3))
    assert "masks/train/one.png" in str(raised.value)


def test_wrong_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no masks\. Give a folder with images/train"):
        find_layout(tmp_path)
    scenes = list_scenes(plain(tmp_path), find_layout(tmp_path), "train")
    write(tmp_path / "masks" / "train" / "one.png", np.full((2, 3), IGNORED, dtype=np.uint8))
    assert (scenes.read_mask(0, (2, 3)) == IGNORED).all()
    (tmp_path / "masks" / "train" / "one.png").unlink()
    with pytest.raises(UserError, match=r"1 of 1 images .* have no mask; .*masks/train/one.png"):
        list_scenes(tmp_path, find_layout(tmp_path), "train")
    (tmp_path / "images" / "train" / "one.png").unlink()
    with pytest.raises(UserError, match="has no images"):
        list_scenes(tmp_path, find_layout(tmp_path), "train")
    for text, message in (("one\n", "has 1 lines"), ("a\na\n", "each once")):
        (tmp_path / "classes.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            find_layout(tmp_path)
    (tmp_path / "classes.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="cannot be read"):
        find_layout(tmp_path)


IMAGES = [image(70, 64, 48), image(7, 50, 60), image(9, 40, 40), image(8, 30, 30)]
BOXES = [
    annotation(7, (10.5, 20, 20, 30.25)),
    annotation(70, (60, 40, 10, 20), 90),  # sticks out
    annotation(7, (0, 0, 50, 60), 18, iscrowd=1, area=1234.5),
    annotation(9, (5, 5, 0, 10)),  # no width
    annotation(7, (1, 2, 3, 4), 18),
    annotation(8, (0, 0, 30, 30), iscrowd=1),
]


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    write_coco(tmp_path / "coco", IMAGES, BOXES)
    return tmp_path / "coco"


def test_images_ascend_with_their_ids_and_classes_with_their_categories(coco: Path) -> None:
    images = list_boxes(coco, "train")
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
    images = list_boxes(coco, "train")
    assert images.boxes_to_learn(0).classes.tolist() == [0, 1]
    assert images.boxes_to_learn(3).boxes.tolist() == [[60, 40, 64, 48]]
    assert [len(images.boxes_to_learn(index).boxes) for index in range(4)] == [2, 0, 0, 1]
    learned = images.without_empty()
    assert [learned.name(index) for index in range(len(learned))] == [images.name(0), images.name(3)]
    assert learned.boxes_to_learn(1).boxes.tolist() == [[60, 40, 64, 48]]
    assert learned.digest != images.digest == list_boxes(coco, "train").digest


def test_an_image_of_another_size_is_damaged(coco: Path) -> None:
    path = coco / "train2017" / "000000000009.png"
    (coco / "train2017" / "000000000008.png").rename(path)
    write_coco(coco / "other", IMAGES, BOXES)
    images = BoxList(find_boxes(coco, "train"), list_boxes(coco / "other", "train").annotations, np.arange(4))
    with pytest.raises(BadSampleError, match="has 30 x 30 pixels, its annotation 40 x 40"):
        read_sized(images, 2)
    with pytest.raises(BadSampleError, match="cannot be read: No such file"):
        read_sized(images, 1)
    (coco / "train2017" / "000000000008.png").symlink_to("gone")  # a link to nothing is a missing image
    with pytest.raises(UserError, match=r"1 of 4 images of .* are not in .*; the first: 000000000008\.png"):
        list_boxes(coco, "train")


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
    if isinstance(content, dict):
        content = {name: value for name, value in (whole | content).items() if value is not None}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message):
        list_boxes(coco, "train")


def test_a_folder_without_boxes_or_images_is_refused(coco: Path) -> None:
    with pytest.raises(UserError, match="There is no folder"):
        find_boxes(coco / "nowhere", "train")
    with pytest.raises(UserError, match="has no boxes of the val split"):
        find_boxes(coco, "val")
    (coco / "annotations" / "instances_train2014.json").write_text("{}")
    with pytest.raises(UserError, match="has 2 files instances_train"):
        find_boxes(coco, "train")
    (coco / "annotations" / "instances_train2017.json").unlink()
    with pytest.raises(UserError, match=r"there is no .*images.train2014"):
        find_boxes(coco, "train")
