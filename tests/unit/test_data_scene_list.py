"""Layouts of images and masks, with the oddities of real ones: each is read, or a message says what to do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.core.batch import IGNORED
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.split_folder import paths_below
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
            with pytest.raises(
                UserError, match=r"train/(ulm|three\.png) cannot be listed: Permission denied\."
            ):
                list_scenes(root, find_layout(root), "train")
            assert set(paths_below(train, denied)) == {"one.png", "ulm", "four"}
        finally:
            if is_root:
                os.seteuid(0)
            (train / "ulm").chmod(0o755)
        assert sorted(denied) == [
            f"{train}/{name} cannot be listed: Permission denied" for name in ("three.png", "ulm")
        ]


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
