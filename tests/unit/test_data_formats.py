"""Tar shards return the bytes, names and classes that were written, and errors name the damage."""

import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from coded_images import contents
from shard_writers import open_files_under, picture, write_tar, write_tar_index

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import build_catalog

INDEX = pytest.mark.parametrize("index", [False, True], ids=["searched", "indexed"])


def train(folder, cached=None):
    return build_catalog(str(folder), "train", cached)


def pictures(*kinds):
    return [picture(number, kind) for number, kind in enumerate(kinds)]


def tar_members(prefix=""):
    one, two, three = pictures("JPEG", "PNG", "JPEG")
    return [
        (f"{prefix}x1.jpg", one),
        (f"{prefix}x1.cls", b"2"),
        (f"{prefix}x2.cls", b"0\n"),
        (f"{prefix}x2.json", b"{}"),
        (f"{prefix}x2.png", two),
        (f"{prefix}x3.JPEG", three),
        (f"{prefix}x3.cls", b"10"),
    ]


@INDEX
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar_shards(tmp_path, index, form):
    prefix = f"{'deep/' * 30}n1/"  # too long for a plain header
    write_tar(tmp_path / "train/b.tar", tar_members(prefix), form=form)
    write_tar(tmp_path / "train/a.tar", [("y.jpg", picture(5)), ("y.cls", b"2")], form=form)
    if index:
        for name in "ab":
            write_tar_index(tmp_path / f"train/{name}.tar")
    catalog = train(tmp_path)
    one, two, three = pictures("JPEG", "PNG", "JPEG")
    assert catalog.classes == ("00", "02", "10")
    assert contents(catalog) == [
        ("02/y.jpg", "02", picture(5)),
        ("n1/x1.jpg", "02", one),
        ("n1/x2.png", "00", two),
        ("n1/x3.JPEG", "10", three),
    ]
    start = (tmp_path / "train/a.tar").read_bytes().index(picture(5))
    end = start + len(picture(5)) - 1
    assert catalog.location(0) == f"{tmp_path}/train/a.tar, bytes {start} to {end} (02/y.jpg)"


def test_a_list_of_classes_beside_tar_shards_sets_their_order(tmp_path):
    write_tar(tmp_path / "train/a.tar", [("zebra/1.jpg", picture(1)), ("zebra/1.cls", b"0")])
    write_tar(tmp_path / "train/b.tar", [("2.jpg", picture(2)), ("2.cls", b"1")])
    (tmp_path / "train/classes.txt").write_text("zebra\nant\n")
    catalog = train(tmp_path)
    assert catalog.classes == ("zebra", "ant")
    assert [entry[:2] for entry in contents(catalog)] == [("zebra/1.jpg", "zebra"), ("ant/2.jpg", "ant")]
    (tmp_path / "train/classes.txt").write_text("zebra\n")
    with pytest.raises(UserError, match=r"2.jpg in .*b.tar is of class 1, but classes.txt has 1 lines"):
        train(tmp_path)
    (tmp_path / "train/classes.txt").write_text("ant\nant\n")
    with pytest.raises(UserError, match=r"classes.txt names classes twice: ant. Give"):
        train(tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.jpg", b"x"), ("2.jpg", b"x"), ("2.cls", b"1")], r"has 1 without its .cls"),
        ([("1.jpg", b"x")], r"has 1 without its .cls"),
        ([("1.cls", b"1"), ("2.jpg", b"x"), ("2.cls", b"1")], r"has 1 without an image"),
        ([("1.jpg", b"x"), ("1.cls", b"ant")], r"has 1.cls with 'ant', not the number of a class"),
        ([("readme.txt", b"x")], r"no images in .*train: 0.tar hold none"),
    ],
)
def test_tar_shards_of_another_layout_are_refused(tmp_path, members, message):
    write_tar(tmp_path / "train/0.tar", members)
    with pytest.raises(UserError, match=message):
        train(tmp_path)


@INDEX
def test_names_that_lead_out_of_a_folder_are_refused(tmp_path, index):
    for parent in ("../n1", "/n1", "n1/..", "a/../../n1"):
        write_tar(tmp_path / "train/0.tar", [(f"{parent}/1.jpg", b"x"), (f"{parent}/1.cls", b"1")])
        if index:
            write_tar_index(tmp_path / "train/0.tar")
        with pytest.raises(UserError, match=r"0\.tar has '.*/1.jpg', which is no name inside a folder"):
            train(tmp_path)


def test_two_images_of_one_name_are_refused(tmp_path):
    one, other = ([(f"{name}/1.jpg", b"x"), (f"{name}/1.cls", b"1")] for name in "ab")
    write_tar(tmp_path / "train/0.tar", one)
    write_tar(tmp_path / "train/1.tar", other + one)
    with pytest.raises(UserError, match=r"two images named a/1.jpg, in 0.tar and in 1.tar"):
        train(tmp_path)


def write_many(shard):
    """Write 20 images; return the position of each header, and the first byte after the last member."""
    content = {"jpg": bytes(700), "cls": b"1"}
    write_tar(shard, [(f"x{n:02}.{end}", data) for n in range(20) for end, data in content.items()])
    with tarfile.open(shard) as tar:
        headers = [member.offset for member in tar]
    return headers, headers[-1] + 1024


def assert_refused(folder, contents_of_shard, message):
    for content in contents_of_shard:
        (folder / "train/0.tar").write_bytes(content)
        with pytest.raises(UserError, match=message):
            train(folder)


def test_a_tar_shard_that_ends_early_or_has_damaged_headers_is_refused(tmp_path):
    shard = tmp_path / "train/0.tar"
    headers, end = write_many(shard)
    whole = shard.read_bytes()
    message = r"0.tar (is cut|cannot be read|has x).*Copy this shard again"
    lengths = (0, 100, *headers[1:], *(start + 512 for start in headers), end, end + 512, end + 1000)
    assert_refused(tmp_path, (whole[:length] for length in lengths), message)
    for start in headers:
        one_byte = whole[start : start + 100] + b"\1" + whole[start + 101 : start + 512]
        others = (bytes(512), b"\xff" * 512, one_byte)
        assert_refused(tmp_path, (whole[:start] + other + whole[start + 512 :] for other in others), message)
    assert_refused(tmp_path, [bytes(len(whole))], r"0.tar is cut or damaged: .* at byte 0\.")
    extended = [whole + extra for extra in (whole, b"more", bytes(2**20))]
    assert_refused(tmp_path, extended, rf"0.tar is cut or damaged: .* at byte {end}\.")
    for padding in (1024, 10240, 2**20):
        shard.write_bytes(whole[:end] + bytes(padding))
        assert len(train(tmp_path)) == 20


def test_an_index_of_another_tar_shard_is_refused(tmp_path):
    shard = tmp_path / "train/0.tar"
    write_tar(shard, tar_members())
    write_tar_index(shard)
    index = shard.with_suffix(".idx")
    right = index.read_text()
    write_tar(shard, [("x0.jpg", bytes(700)), ("x0.cls", b"1"), *tar_members()])
    with pytest.raises(UserError, match=r"0.idx does not fit: x1.jpg .* Make this index"):
        train(tmp_path)
    write_tar(shard, tar_members())
    for wrong, message in (
        (right.replace("v1.2", "v1.1"), "does not begin with v1.2"),
        (right.replace("v1.2 3", "v1.2 4"), "lists 3 samples, but says 4"),
        (right.replace("x1.jpg", "x9.jpg"), "x9.jpg is not where line 2 says"),
        (right.replace(f" {len(picture(0))} x1.jpg", " 99 x1.jpg"), "x1.jpg is not where line 2 says"),
        (right.replace("x1.jpg", "x 1.jpg"), "has no ending, offset, size and name in line 2"),
        ("", "does not begin with v1.2"),
    ):
        index.write_text(wrong)
        with pytest.raises(UserError, match=message):
            train(tmp_path)


def write_shard(folder):
    members = [(f"{n}.{e}", d) for n in range(3) for e, d in (("jpg", picture(n)), ("cls", b"1"))]
    write_tar(folder / "train/s.tar", members)
    return folder / "train/s.tar"


def test_damage_during_the_run_is_a_bad_sample_with_its_path(tmp_path):
    shard = write_shard(tmp_path)
    write_tar(tmp_path / "test/s.tar", tar_members())
    assert build_catalog(str(tmp_path), "val", None).source == str(tmp_path / "test")
    catalog = train(tmp_path)
    first = catalog.read(0).tobytes()
    data = shard.read_bytes()
    offset = data.index(picture(1))
    with shard.open("r+b") as file:
        file.seek(offset)
        file.write(b"\0\0\0\0")
    with pytest.raises(BadSampleError, match=rf"^{shard}, bytes .* does not begin as an image"):
        catalog.read(1)
    os.truncate(shard, data.index(picture(2)) + 5)
    with pytest.raises(BadSampleError, match=rf"^{shard}, bytes .*: the shard has been cut short"):
        catalog.read(2)
    assert catalog.read(0).tobytes() == first
    shard.unlink()
    assert catalog.read(0).tobytes() == first  # the shard is still open
    catalog.close()
    with pytest.raises(BadSampleError, match=rf"^{shard}, bytes .* has gone since it was listed"):
        catalog.read(0)


def test_a_cached_catalog_is_used_until_a_shard_changes(tmp_path):
    shard = write_shard(tmp_path)
    inode = train(tmp_path, tmp_path / "cached").path.stat().st_ino
    again = train(tmp_path, tmp_path / "cached")
    assert again.path.stat().st_ino == inode
    assert len(contents(again)) == 3
    os.utime(shard, ns=(1, 1))
    assert train(tmp_path, tmp_path / "cached").path.stat().st_ino != inode


def test_many_threads_read_more_shards_than_can_be_open(tmp_path):
    expected = [picture(number) for number in range(100)]
    for number, image in enumerate(expected):
        members = [(f"a/{number:03d}.jpg", image), (f"a/{number:03d}.cls", b"0")]
        write_tar(tmp_path / f"train/{number:03d}.tar", members)
    catalog = train(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda index: catalog.read(index).tobytes(), list(range(100)) * 5))
    assert read == expected * 5
    assert open_files_under(tmp_path) == 64
    catalog.close()
    assert open_files_under(tmp_path) == 0
