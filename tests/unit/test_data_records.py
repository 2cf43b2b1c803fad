"""TFRecord and RecordIO shards are converted with names, classes and bytes; training names the command."""

import struct

import pytest
from coded_images import contents
from shard_writers import (
    RECORDIO_MAGIC,
    example,
    picture,
    recordio_content,
    recordio_parts,
    write_recordio,
    write_tfrecord,
)

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.packing.records import open_records
from horovod_volo.pack import main as pack


def converted(folder, form, out):
    """Convert the shards in train/ as both splits, in their order; return name, class and bytes of each."""
    if not (folder / "val").exists():
        (folder / "val").symlink_to(folder / "train")
    arguments = [str(folder), str(out), "--from", form, "--no-shuffle", "--workers", "1"]
    assert pack(arguments) == 0
    return contents(build_catalog(str(out), "train", None))


def assert_resumable(folder, form, out):
    """Check that a run on the shards can be resumed on the result: the images and their order are equal."""
    before = build_catalog(str(folder), "train", out / "lists", records=form)
    assert build_catalog(str(out), "train", None).digest == before.digest


def imagenet_examples():
    first = {"image/height": 12, "image/colorspace": "RGB", "image/ratio": 0.5, "image/class/label": 2}
    first |= {"image/class/synset": "n2", "image/filename": "some/where/n2_1.JPEG"}
    second = {"image/class/synset": "n1", "image/filename": "n1_7.JPEG", "image/class/label": 1}
    third = {"image/class/text": "t" * 5000, "image/filename": "n2_3.JPEG"}
    third |= {"image/encoded": picture(2, "PNG"), "image/class/synset": "n2", "image/class/label": 300}
    return [
        example(first | {"image/encoded": picture(0)}),
        example(second | {"image/encoded": picture(1)}, packed=False),
        example(third),
    ]


def test_tfrecord_shards_keep_names_classes_and_bytes(tmp_path):
    one, two, three = imagenet_examples()
    write_tfrecord(tmp_path / "data/train/train-00000-of-00002", [one, two])
    write_tfrecord(tmp_path / "data/train/train-00001-of-00002", [three], index=True)
    assert converted(tmp_path / "data", "tfrecord", tmp_path / "out") == [
        ("n2/n2_1.JPEG", "n2", picture(0)),
        ("n1/n1_7.JPEG", "n1", picture(1)),
        ("n2/n2_3.JPEG", "n2", picture(2, "PNG")),
    ]
    assert build_catalog(str(tmp_path / "out"), "val", None).classes == ("n1", "n2")
    assert_resumable(tmp_path / "data", "tfrecord", tmp_path / "out")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        # Without names of files and classes: numbered, padded with zeros so that their order is the number's.
        ({"image/class/label": 12}, ("12/part-000000.jpg", "12")),
        # The classes of Open Images begin with a slash; their members do not.
        ({"image/class/synset": "/m/01", "image/filename": "1.jpg"}, ("01/1.jpg", "/m/01")),
        ({"image/class/label": 3, "image/filename": "x"}, ("3/x.jpg", "3")),  # no suffix: it gets one
    ],
)
def test_names_of_tfrecord_shards(tmp_path, features, expected):
    write_tfrecord(tmp_path / "data/train/part.tfrecord", [example({"image/encoded": picture(1)} | features)])
    ((name, class_name, image),) = converted(tmp_path / "data", "tfrecord", tmp_path / "out")
    assert (name, class_name, image) == (*expected, picture(1))


def test_recordio_shards_keep_classes_and_bytes(tmp_path):
    one, two, three = (picture(number, kind) for number, kind in enumerate(("JPEG", "PNG", "JPEG")))
    # A record with the magic number at multiples of 4, also at its end, is stored in parts.
    header = 24
    tail = bytes(-(header + len(three)) % 4)
    split = three + tail + RECORDIO_MAGIC + b"between." + RECORDIO_MAGIC * 2 + b"end" + b"\0" + RECORDIO_MAGIC
    contents = [
        recordio_content([24.0, 3.0], 0, b""),  # some tools write a first record without an image
        recordio_content(11.0, 1, one),
        recordio_content([2.0, 5.0], 2, two),
        recordio_content(2.0, 3, split),
        recordio_content(11.0, 4, picture(9)),
    ]
    assert len(recordio_parts(contents[3])) == 5
    write_recordio(tmp_path / "data/train/data.rec", contents, index=True)
    assert converted(tmp_path / "data", "recordio", tmp_path / "out") == [
        ("11/data-00000001.jpg", "11", one),
        ("02/data-00000002.png", "02", two),
        ("02/data-00000003.jpg", "02", split),
        ("11/data-00000004.jpg", "11", picture(9)),
    ]
    assert_resumable(tmp_path / "data", "recordio", tmp_path / "out")


@pytest.mark.parametrize("form", ["tfrecord", "recordio"])
def test_training_names_the_command_that_converts(tmp_path, form):
    if form == "tfrecord":
        write_tfrecord(tmp_path / "train/0.tfrecord", imagenet_examples())
    else:
        write_recordio(tmp_path / "train/0.rec", [recordio_content(1.0, 0, picture(0))])
    with pytest.raises(UserError, match=rf"pack --from {form} {tmp_path} OUT"):
        build_catalog(str(tmp_path), "train", None)
    other = {"tfrecord": "recordio", "recordio": "tfrecord"}[form]
    with pytest.raises(UserError, match=rf"no {other} shards.*--from"):
        build_catalog(str(tmp_path), "train", tmp_path / "lists", records=other)


def damaged_shards():
    one, two = (recordio_content(1.0, number, picture(number)) for number in range(2))
    whole = imagenet_examples()
    image = {"image/encoded": b"x"}
    unlabelled, numbered = example(image), example(image | {"image/class/label": 7})
    leading_out = image | {"image/filename": "1.jpg", "image/class/synset": "n1/.."}
    yield "tfrecord", whole, slice(None, -50), "cut short"
    yield "tfrecord", whole, slice(1, None), "at byte 0"
    yield "tfrecord", [unlabelled], slice(None), "label"
    yield "tfrecord", [whole[0], numbered], slice(None), r"by name \(n2\) and some only by number \(7\)"
    yield "tfrecord", [example(leading_out)], slice(None), "no name inside a folder"
    yield "recordio", [one, two], slice(None, -9), "cut short"
    yield "recordio", [one, two], slice(1, None), "at byte 0: no record begins"
    for label in (1.5, -1.0, float("nan")):
        yield "recordio", [recordio_content(label, 0, picture(0))], slice(None), "not the number of a class"


@pytest.mark.parametrize(("form", "records", "kept", "message"), list(damaged_shards()))
def test_damaged_shards_are_refused(tmp_path, form, records, kept, message):
    shard = tmp_path / "train" / {"tfrecord": "x.tfrecord", "recordio": "x.rec"}[form]
    (write_tfrecord if form == "tfrecord" else write_recordio)(shard, records)
    shard.write_bytes(shard.read_bytes()[kept])
    with pytest.raises(UserError, match=message):
        build_catalog(str(tmp_path), "train", tmp_path / "lists", records=form)


def test_a_record_that_is_damaged_during_the_conversion_is_a_bad_sample(tmp_path):
    shard = tmp_path / "train/s.rec"
    images = [picture(n) + bytes(-len(picture(n)) % 4) + RECORDIO_MAGIC * 2 for n in range(2)]
    write_recordio(shard, [recordio_content(1.0, n, image) for n, image in enumerate(images)])
    listed = build_catalog(str(tmp_path), "train", tmp_path / "lists", records="recordio")
    catalog = open_records(listed.path, listed.digest, "recordio")
    data = bytearray(shard.read_bytes())
    struct.pack_into("<I", data, data.index(images[0][:-8]) + len(images[0]) - 8, 0)  # of the second part
    shard.write_bytes(data)
    with pytest.raises(BadSampleError, match=r"s.rec, bytes .*no record begins"):
        catalog.read(0)
    assert catalog.read(1).tobytes() == images[1]
