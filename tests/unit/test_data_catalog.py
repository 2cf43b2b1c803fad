"""The catalog lists what is there, in an order that only names decide, and says what is wrong."""

from pathlib import Path

import pytest

from horovod_volo.config.errors import UserError
from horovod_volo.data.catalog import check_same_classes, read_folder


def touch(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_lists_images_by_class_and_name(tmp_path):
    touch(tmp_path / "train", "b/2.JPG", "b/1.png", "a/x.jpeg", "a-b/z.webp", "a-b/y.tiff")
    catalog = read_folder(str(tmp_path), "train")
    assert catalog.root == tmp_path / "train"
    assert catalog.classes == ("a", "a-b", "b")
    assert catalog.paths == ("a/x.jpeg", "a-b/y.tiff", "a-b/z.webp", "b/1.png", "b/2.JPG")
    assert catalog.targets.tolist() == [0, 1, 1, 2, 2]
    assert catalog.targets.dtype == "int64"
    assert len(catalog) == 5


def test_ignores_what_is_no_image_of_a_class(tmp_path):
    touch(
        tmp_path / "train", "a/1.jpg", "a/notes.txt", "a/._1.jpg", "a/deeper/2.jpg", ".cache/3.jpg", "4.jpg"
    )
    (tmp_path / "train" / "a" / "folder.jpg").mkdir()
    assert read_folder(str(tmp_path), "train").paths == ("a/1.jpg",)


def test_follows_linked_class_folders(tmp_path):
    touch(tmp_path, "elsewhere/1.jpg")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a").symlink_to(tmp_path / "elsewhere")
    assert read_folder(str(tmp_path), "train").paths == ("a/1.jpg",)


@pytest.mark.parametrize("name", ["val", "validation"])
def test_finds_either_name_of_the_validation_folder(tmp_path, name):
    touch(tmp_path, f"{name}/a/1.jpg")
    assert read_folder(str(tmp_path), "val").root == tmp_path / name


def test_no_data_folder(tmp_path):
    with pytest.raises(UserError, match=r"no data folder .*nowhere. Name the folder"):
        read_folder(str(tmp_path / "nowhere"), "train")
    with pytest.raises(UserError, match=r"no data folder is given. Name the folder"):
        read_folder("", "train")


def test_no_split_folder_tells_what_was_looked_for_and_what_is_there(tmp_path):
    with pytest.raises(UserError, match=r"no folder train; it has no folders at all"):
        read_folder(str(tmp_path), "train")
    touch(tmp_path, "training/a/1.jpg", "test/a/1.jpg")
    with pytest.raises(UserError, match=r"no folder val or validation; it has test, training. "):
        read_folder(str(tmp_path), "val")


def test_no_class_folders(tmp_path):
    touch(tmp_path, "train/1.jpg")
    with pytest.raises(UserError, match=r"train has no class folders. Put each image under .*train/CLASS/"):
        read_folder(str(tmp_path), "train")


def test_empty_class_folders_are_named_but_not_by_the_hundred(tmp_path):
    touch(tmp_path, "train/full/1.jpg")
    for number in range(12):
        (tmp_path / "train" / f"empty{number:02d}").mkdir()
    with pytest.raises(UserError, match=r"no images in .*train/empty00, .*empty07 and 4 more. Add") as caught:
        read_folder(str(tmp_path), "train")
    assert "empty08" not in str(caught.value)
    assert "full" not in str(caught.value)


def test_splits_of_different_classes_are_refused(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/b/1.jpg", "val/c/1.jpg")
    train, val = read_folder(str(tmp_path), "train"), read_folder(str(tmp_path), "val")
    check_same_classes(train, train)
    with pytest.raises(UserError, match=r"val has classes that .*train lacks: c. Remove"):
        check_same_classes(train, val)
    (tmp_path / "val" / "c" / "1.jpg").unlink()
    (tmp_path / "val" / "c").rmdir()
    with pytest.raises(UserError, match=r"val lacks classes that .*train has: a. "):
        check_same_classes(train, read_folder(str(tmp_path), "val"))
