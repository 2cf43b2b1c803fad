"""The catalog lists images in the order of their names, and errors name what is missing or wrong."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from label_samples import touch
from shard_writers import picture, write_tar

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog, check_same_classes, open_catalog
from horovod_volo.data.images.split_folder import HeldOut


def read_folder(data_dir, split):
    return build_catalog(data_dir, split, None)


def names(catalog):
    return tuple(catalog.name(index) for index in range(len(catalog)))


def test_lists_images_by_class_and_name(tmp_path):
    touch(tmp_path / "train", "b/2.JPG", "b/1.png", "a/x.jpeg", "a-b/z.webp", "a-b/y.tiff")
    catalog = read_folder(str(tmp_path), "train")
    assert catalog.source == str(tmp_path / "train")
    assert catalog.classes == ("a", "a-b", "b")
    assert names(catalog) == ("a/x.jpeg", "a-b/y.tiff", "a-b/z.webp", "b/1.png", "b/2.JPG")
    assert catalog.targets.tolist() == [0, 1, 1, 2, 2]
    assert catalog.targets.dtype == "int32"
    assert len(catalog) == 5
    assert catalog.location(4) == str(tmp_path / "train/b/2.JPG")


def test_ignores_files_that_are_not_images_of_a_class_and_follows_linked_folders(tmp_path):
    others = ("a/notes.txt", "a/._1.jpg", "a/deeper/2.jpg", ".cache/3.jpg", "4.jpg")
    touch(tmp_path / "train", "a/1.jpg", *others)
    touch(tmp_path, "elsewhere/5.jpg")
    (tmp_path / "train" / "a" / "folder.jpg").mkdir()
    (tmp_path / "train" / "b").symlink_to(tmp_path / "elsewhere")
    assert names(read_folder(str(tmp_path), "train")) == ("a/1.jpg", "b/5.jpg")


def test_links_to_nothing_are_not_left_out_in_silence(tmp_path):
    """As in a checkout of git-annex whose files have not been fetched, or where a disk is not mounted."""
    touch(tmp_path, "train/a/00.jpg", "train/b/00.jpg", "train/b/read.me", "elsewhere/1.jpg")
    links = [f"{name}/{number:02}.jpg" for name in "ab" for number in range(1, 10)]
    for link in links:
        (tmp_path / "train" / link).symlink_to("../../.git/annex/objects/gone")
    (tmp_path / "train/b/notes").symlink_to("gone")  # no image
    lost = r"18 of 20 entries of .*train are links to nothing, the first: a/01\.jpg\. Fetch"
    with pytest.raises(UserError, match=lost):
        read_folder(str(tmp_path), "train")
    (tmp_path / "train").rename(tmp_path / "data")
    with pytest.raises(UserError, match=lost.replace("train", "data")):  # classes without `train` above them
        build_catalog(str(tmp_path / "data"), "train", None, HeldOut(share=0.1))
    for link in links:
        (tmp_path / "data" / link).unlink()
    (tmp_path / "data").rename(tmp_path / "train")
    assert names(read_folder(str(tmp_path), "train")) == ("a/00.jpg", "b/00.jpg")
    (tmp_path / "train/c").symlink_to("/mnt/none/c")
    with pytest.raises(UserError, match=r"1 of 3 entries of .* the first: c\. Fetch"):
        read_folder(str(tmp_path), "train")
    (tmp_path / "train/c").unlink()
    (tmp_path / "val").symlink_to("/mnt/none/val")
    with pytest.raises(UserError, match=r"the first: val\. "):  # and no share of the training images instead
        build_catalog(str(tmp_path), "val", None, HeldOut(share=0.1))
    (tmp_path / "val").unlink()
    (tmp_path / "train/a/loop.jpg").symlink_to("loop.jpg")
    with pytest.raises(UserError, match=r"Too many levels of symbolic links: .*loop\.jpg"):
        read_folder(str(tmp_path), "train")


def test_pipes_and_sockets_are_no_images_and_no_links(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg")
    for name in ("train/control", "train/a/2.jpg"):
        os.mkfifo(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "train/s"))
        assert names(read_folder(str(tmp_path), "train")) == ("a/1.jpg", "b/1.jpg")
    (tmp_path / "train/b/2.jpg").symlink_to(tmp_path / "train/control")
    with pytest.raises(UserError, match=r"1 of 3 entries of .*train .* the first: b/2\.jpg"):
        read_folder(str(tmp_path), "train")


def test_the_folder_of_held_out_images_has_one_of_several_names_or_is_chosen(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "val/a/2.jpg", "dev/a/3.jpg", "test/4.jpg")
    assert names(build_catalog(str(tmp_path), "val", None, HeldOut("dev"))) == ("a/3.jpg",)
    assert names(build_catalog(str(tmp_path), "train", None, HeldOut("dev", 0.5))) == ("a/1.jpg",)
    with pytest.raises(UserError, match=r"no folder eval; it has dev, test, train, val\. Mend --val-split"):
        build_catalog(str(tmp_path), "val", None, HeldOut("eval"))
    for name in ("val", "validation", "valid", "test"):
        touch(tmp_path, f"{name}-only/{name}/a/1.jpg")
        assert read_folder(str(tmp_path / f"{name}-only"), "val").source.endswith(f"/{name}")


@pytest.mark.parametrize("inside", ["train/", ""])
def test_a_share_of_each_class_is_held_out(tmp_path, inside):
    """Every image is in one of the parts, which depend on the seed alone, and are kept apart on disk."""
    touch(tmp_path / "data", *(f"{inside}{c}/{n:03}.jpg" for c in "abc" for n in range(40)))
    if inside:
        touch(tmp_path / "data", "test/flat.jpg")  # images without classes
    lists = tmp_path / "lists"

    def parts(seed, share=0.1):
        chosen = HeldOut(share=share, seed=seed)
        return [build_catalog(str(tmp_path / "data"), split, lists, chosen) for split in ("train", "val")]

    train, val = parts(1)
    assert sorted(names(train) + names(val)) == [f"{c}/{n:03}.jpg" for c in "abc" for n in range(40)]
    assert np.bincount(val.targets).tolist() == [4, 4, 4]
    assert [names(each) for each in parts(1)] == [names(train), names(val)]
    assert len({names(parts(seed)[1]) for seed in range(5)}) == 5
    assert [len(each) for each in parts(1, share=0.001)] == [117, 3]
    assert names(train) == tuple(sorted(names(train)))


@pytest.mark.parametrize(
    ("files", "split", "share", "message"),
    [
        ([], "train", 0, "no folders at all"),
        (["training/a/1.jpg"], "val", 0, "no folder val .* it has training"),
        (["train/1.jpg"], "train", 0, "train has no class folders.*train/CLASS"),
        (["train/a/1.jpg", "train/0.tar", "train/0.rec"], "train", 0, "formats: .*0.tar .* a .folder"),
        (["train/a/1.jpg", "train/b/1.jpg"], "train", 0.1, "class a has one image.*Add an image"),
        (["train/a/1.jpg", "train/b/1.jpg"], "val", 0.1, "class a has one image.*Add an image"),
        (["train/1.tar"], "val", 0.1, "holds shards, from which no images can be held out"),
        (["1.jpg", "2.jpg"], "train", 0.1, "2 images .1.jpg, 2.jpg.* and no folders. Put"),
        (["pets/cats/1.jpg", "cars/trucks/1.jpg"], "train", 0.1, "such as cars/trucks, .* one level deep"),
        (["cats/1.jpg", "cats/2.jpg"], "train", 0.1, "one class only, cats. Add"),
        (["train/pets/cats/1.jpg", "train/b/1.jpg"], "train", 0, "pets. The first has folders .cats"),
    ],
)
def test_what_is_there_instead_of_classes_is_said(tmp_path, files, split, share, message):
    touch(tmp_path, *files)
    with pytest.raises(UserError, match=message):
        build_catalog(str(tmp_path), split, None, HeldOut(share=share))


def test_no_data_folder(tmp_path):
    for data_dir in (str(tmp_path / "nowhere"), ""):
        with pytest.raises(UserError, match=r"no data folder .*Name the folder"):
            read_folder(data_dir, "train")


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


def test_names_that_are_not_utf_8_can_be_read(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/train/a/\xff.jpg")).write_bytes(b"bytes")
    catalog = build_catalog(str(tmp_path), "train", tmp_path / "cached")
    assert os.fsencode(catalog.name(0)) == b"a/\xff.jpg"
    assert catalog.read(0).tobytes() == b"bytes"


def test_a_cached_catalog_is_used_until_the_folders_change(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg")
    cached = tmp_path / "lists" / "cached"
    first = build_catalog(str(tmp_path), "train", cached)
    inode = first.path.stat().st_ino
    assert build_catalog(str(tmp_path), "train", cached).path.stat().st_ino == inode
    assert build_catalog(str(tmp_path), "val", cached).path != first.path
    touch(tmp_path, "train/b/2.jpg")
    os.utime(tmp_path / "train/b", ns=(1, 1))  # far from now, whatever the resolution of the clock is
    second = build_catalog(str(tmp_path), "train", cached)
    assert names(second) == ("a/1.jpg", "b/1.jpg", "b/2.jpg")
    assert second.digest != first.digest
    assert names(first) == ("a/1.jpg", "b/1.jpg")  # the open old list is unchanged
    assert sorted(path.suffix for path in cached.iterdir()) == [".catalog", ".catalog"]


def test_no_changed_byte_of_a_cached_catalog_is_read(tmp_path):
    write_tar(
        tmp_path / "train/0.tar",
        [("a/1.jpg", picture(1)), ("a/1.cls", b"1"), ("2.jpg", b"x"), ("2.cls", b"0")],
    )
    catalog = build_catalog(str(tmp_path), "train", tmp_path / "cached")
    whole = catalog.path.read_bytes()
    zeros = whole.index(bytes(1000))  # up to the class numbers, which are aligned
    for position in (*range(zeros + 9), *range(len(whole.rstrip(b"\0")) - 300, len(whole))):
        changed = bytearray(whole)
        changed[position] ^= 1
        catalog.path.write_bytes(changed)
        with pytest.raises(UserError, match="or sees it damaged"):
            open_catalog(catalog.path, catalog.digest)
    build_catalog(str(tmp_path), "train", tmp_path / "cached")
    assert catalog.path.read_bytes() == whole


def test_a_catalog_folder_that_cannot_be_written_is_an_error(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "taken")
    with pytest.raises(UserError, match=r"keep the list in .*taken.* with --catalog"):
        build_catalog(str(tmp_path), "train", tmp_path / "taken")


def test_other_ranks_open_the_same_list(tmp_path):
    touch(tmp_path, "train/a/1.jpg", "train/b/1.jpg")
    made = build_catalog(str(tmp_path), "train", tmp_path / "cached")
    opened = open_catalog(made.path, made.digest)
    assert names(opened) == names(made)
    assert opened.classes == made.classes
    assert opened.targets.tolist() == [0, 1]
    with pytest.raises(UserError, match=r"sees other images .* --catalog-dir must name a folder"):
        open_catalog(made.path, "0" * 64)
    with pytest.raises(UserError, match=r"does not see .* --catalog-dir must name a folder"):
        open_catalog(tmp_path / "elsewhere", made.digest)


def test_the_digest_depends_on_names_order_and_classes(tmp_path):
    touch(tmp_path, "1/train/a/1.jpg", "1/train/b/1.jpg", "2/train/a/1.jpg", "2/train/b/1.jpg")
    touch(tmp_path, "3/train/a/1.jpg", "3/train/b/2.jpg", "4/train/a/1.jpg", "4/train/c/1.jpg")
    same, again, *others = (read_folder(str(tmp_path / number), "train").digest for number in "1234")
    assert same == again
    assert len({same, *others}) == 3
