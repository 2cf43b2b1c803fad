"""A label store returns the exact map of each image by the image's index, and reports damage."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from label_samples import catalog_of, make_store, packed_catalog_of, publish, random_store
from shard_writers import open_files_under

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.token_labels.keys import catalog_keys
from horovod_volo.token_labels.published_maps import PublishedMaps
from horovod_volo.token_labels.source import map_warnings, open_labels
from horovod_volo.token_labels.store import LabelStore

NAMES = ("a/1.jpg", "a/2.x.jpg", "b/1.jpg", "b/3.png", "c/1.jpg", "c/2.jpg", "c/4.jpg")


@pytest.fixture
def catalog(tmp_path):
    return catalog_of(tmp_path, *NAMES)


@pytest.fixture
def stored(tmp_path, catalog):
    """Write the store `s` of random maps; return their logits and class numbers."""
    return random_store(tmp_path / "s", catalog)


def test_maps_are_read_by_index_from_a_store_in_any_order(tmp_path, catalog):
    keys = catalog_keys(catalog)
    assert keys[:2] == ["a/1", "a/2"]
    order = np.random.default_rng(1).permutation(len(keys))
    scores, ids = random_store(tmp_path / "same", catalog, digest=catalog.digest)
    shuffled = [keys[row] for row in order], scores[order], ids[order]
    make_store(tmp_path / "shuffled", *shuffled, classes=3, shard_rows=2)
    for folder, cache in (("same", None), ("shuffled", None), ("shuffled", tmp_path / "cache")):
        labels = open_labels(str(tmp_path / folder), catalog, cache)
        assert labels.map_shape == (2, 3, 4)
        for index in np.random.default_rng(2).integers(0, len(catalog), 50).tolist():
            read_scores, read_ids = labels.read(index)
            assert (read_scores.dtype, read_ids.dtype) == (np.float16, np.int16)
            assert read_scores.flags.writeable
            assert (read_scores == scores[index]).all()
            assert (read_ids == ids[index]).all()
        labels.close()


SIMILAR = ("a/scan.0001.png", "a/scan.0002.png", "b/1.jpg", "b/1.png", "c/x.png", "c/y")


def test_generated_maps_are_found_by_full_names(tmp_path):
    random = np.random.default_rng(0)
    scores = random.normal(size=(6, 2, 3, 4)).astype(np.float16)
    ids = random.integers(0, 3, scores.shape)
    make_store(tmp_path / "s", SIMILAR, scores, ids, classes=3, generated=True)
    own = {name: row for row, name in enumerate(SIMILAR)}
    # The image of a map may be held out while the added one is not.
    others = ("a/scan.0003.png", "b/1.png.jpg", "c/x.png.jpg")
    added = catalog_of(tmp_path / "added", *SIMILAR[:3], *SIMILAR[4:5], *others)
    # As packing names images that it encodes again; b/1.jpg.jpg was added.
    lengthened = {"a/scan.0001.png.jpg": 0, "b/1.png.jpg": 3, "c/y.png": 5}
    packed = packed_catalog_of(tmp_path / "packed", *lengthened, "b/1.jpg", "b/1.jpg.jpg")
    for catalog, rows in ((added, own), (packed, own | lengthened)):
        store = LabelStore(tmp_path / "s", catalog, tmp_path / "cache")
        for index in range(len(catalog)):
            if catalog.name(index) in rows:
                assert (store.read(index)[0] == scores[rows[catalog.name(index)]]).all()
            else:
                with pytest.raises(BadSampleError, match="has no label map of"):
                    store.read(index)
    same = ("a/scan.0001.png.jpg", "a/scan.0001.png.webp")
    twice = packed_catalog_of(tmp_path / "twice", *same, *SIMILAR[2:5])
    with pytest.raises(UserError, match=r"a/scan\.0001\.png\.jpg and .* same label map"):
        LabelStore(tmp_path / "s", twice, None)


def test_rows_of_a_folder_are_not_taken_for_those_of_shards(tmp_path):
    """Their catalogs have the same digest, but only shards have names that packing has lengthened."""
    names = "a/1.jpg", "b/1.jpg", "b/2.png.jpg"
    catalogs = catalog_of(tmp_path / "folder", *names), packed_catalog_of(tmp_path / "packed", *names)
    assert catalogs[0].digest == catalogs[1].digest
    scores = np.arange(3, dtype=np.float16).reshape(3, 1, 1, 1)
    keys = ["a/1.jpg", "b/1.jpg", "b/2.png"]
    make_store(tmp_path / "s", keys, scores, np.zeros(scores.shape), classes=2, generated=True)
    folder, packed = (LabelStore(tmp_path / "s", catalog, tmp_path / "cache") for catalog in catalogs)
    assert packed.read(2)[0].item() == 2
    with pytest.raises(BadSampleError, match=r"has no label map of b/2\.png\.jpg"):
        folder.read(2)


@pytest.mark.parametrize("digest", ["same", "other"])
def test_stores_of_earlier_versions_are_read_where_keys_are_unique(tmp_path, digest, catalog):
    digest = catalog.digest if digest == "same" else ""
    scores, _ = random_store(tmp_path / "s", catalog, digest=digest, teacher="a teacher")
    description = tmp_path / "s" / "store.json"
    metadata = json.loads(description.read_text())
    for field in ("generated", "checksum"):  # which earlier versions did not write
        metadata.pop(field, None)
    description.write_text(json.dumps(metadata))
    store = LabelStore(tmp_path / "s", catalog, None)
    assert not store.generated
    (warning,) = map_warnings("s", store)
    assert "generate them again with their teacher, a teacher" in warning
    assert all((store.read(index)[0] == scores[index]).all() for index in range(len(catalog)))
    with_another = catalog_of(tmp_path, "b/3.jpg")
    with pytest.raises(UserError, match=r"b/3\.jpg and b/3\.png in .* horovod-volo labels generate"):
        LabelStore(tmp_path / "s", with_another, None)


@pytest.mark.parametrize(
    ("classes", "dtype"), [(21841, np.int16), (32767, np.int16), (32768, np.int32), (40001, np.int32)]
)
def test_all_class_numbers_are_exact(tmp_path, classes, dtype):
    catalog = catalog_of(tmp_path, "a/1.jpg", "a/2.jpg")
    # Only the number of classes is used.
    catalog.classes = ("a",) * classes
    ids = np.array([[[[0, 2049, 16385, classes - 1]]], [[[2047, 2048, classes // 2, classes - 2]]]])
    about = {"classes": classes, "digest": catalog.digest}
    make_store(tmp_path / "s", catalog_keys(catalog), np.zeros(ids.shape, np.float16), ids, **about)
    store = LabelStore(tmp_path / "s", catalog, None)
    for index in range(2):
        read = store.read(index)[1]
        assert read.dtype == dtype
        assert (read == ids[index]).all()


def test_rows_are_computed_once_and_cached(tmp_path, catalog, stored):
    cache = tmp_path / "cache"
    LabelStore(tmp_path / "s", catalog, cache)
    (cached,) = cache.iterdir()
    (tmp_path / "s" / "keys.txt").unlink()  # the cached rows are used
    assert (LabelStore(tmp_path / "s", catalog, cache).read(4)[0] == stored[0][4]).all()
    whole = cached.read_bytes()
    for damaged in (b"", b"truncated", whole[:-1], whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]):
        cached.write_bytes(damaged)
        with pytest.raises(UserError, match=r"keys\.txt cannot be read"):
            LabelStore(tmp_path / "s", catalog, cache)


def test_images_without_a_map_are_reported(tmp_path, catalog):
    keys = catalog_keys(catalog)
    scores, ids = random_store(tmp_path / "all", catalog)
    ids[2] = -1
    make_store(tmp_path / "s", keys[:-1], scores[:-1], ids[:-1], classes=3)
    store = LabelStore(tmp_path / "s", catalog, None)
    assert [shard.missing for shard in store.metadata.shards] == [1, 0]
    store.read(0)
    for index in (2, 6):
        with pytest.raises(BadSampleError, match=f"has no label map of {catalog.name(index)}"):
            store.read(index)


def test_a_store_for_other_images_is_refused(tmp_path, catalog):
    scores, ids = random_store(tmp_path / "all", catalog)
    keys = [key.replace("b/", "z/") for key in catalog_keys(catalog)]
    make_store(tmp_path / "classes", keys, scores, ids, classes=3)
    with pytest.raises(UserError, match=r"no label map for any image of class b\."):
        open_labels(str(tmp_path / "classes"), catalog, None)
    make_store(tmp_path / "number", catalog_keys(catalog), scores, ids, classes=4)
    with pytest.raises(UserError, match=r"have 4 classes, .* have 3\. Point --token-label-data"):
        open_labels(str(tmp_path / "number"), catalog, None)


@pytest.mark.parametrize("damage", ["missing", "truncated", "other shard"])
def test_a_damaged_shard_affects_only_its_own_maps(tmp_path, catalog, stored, damage):
    shard = tmp_path / "s" / "maps-00001.safetensors"
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        shard.write_bytes((tmp_path / "s" / "maps-00002.safetensors").read_bytes())
    store = LabelStore(tmp_path / "s", catalog, None)
    for index in (0, 2, 6):
        assert (store.read(index)[0] == stored[0][index]).all()
    for index in (3, 5):
        with pytest.raises(BadSampleError, match=r"shard .*maps-00001\.safetensors "):
            store.read(index)


def test_damaged_values_are_found(tmp_path, catalog, stored):
    (scores, ids), shard = stored, tmp_path / "s" / "maps-00000.safetensors"
    content = shard.read_bytes()
    of_ids = content.index(ids[1].astype(np.int16).tobytes()) + 7  # the high byte of a class number
    of_scores = content.index(scores[1].tobytes()) + 7  # the high byte of a logit
    damages = [(of_ids, b"\x40", "outside the 3 classes")]
    damages += [(of_scores, byte, "not finite") for byte in (b"\x7c", b"\xfc", b"\x7e")]
    for offset, byte, message in damages:
        shard.write_bytes(content[:offset] + byte + content[offset + 1 :])
        store = LabelStore(tmp_path / "s", catalog, None)
        store.read(0)
        with pytest.raises(BadSampleError, match=rf"a/2\.x\.jpg .* {message}"):
            store.read(1)


def test_damaged_keys_and_keys_of_several_images_are_refused(tmp_path, catalog, stored):
    keys = tmp_path / "s" / "keys.txt"
    first, second, *others = keys.read_text().split("\n")
    keys.write_text("\n".join([second, first, *others]))
    with pytest.raises(UserError, match=r"keys\.txt is damaged: it does not match its checksum\. Copy"):
        LabelStore(tmp_path / "s", catalog, None)
    # Only one of the images that share a key may be in the catalog: others are held out.
    twice, zeros = [*catalog_keys(catalog), "b/3"], np.zeros((8, 1, 1, 1), np.float16)
    make_store(tmp_path / "twice", twice, zeros, zeros, classes=3)
    with pytest.raises(UserError, match=r"keys\.txt has a key twice, .* Generate the store again"):
        LabelStore(tmp_path / "twice", catalog, None)


def test_a_changed_description_of_a_store_is_refused(tmp_path, catalog, stored):
    description = tmp_path / "s" / "store.json"
    right = json.loads(description.read_text())
    for changes in ({"shard_rows": 4}, {"teacher": "another"}, {"checksum": "0"}):
        description.write_text(json.dumps(right | changes))
        with pytest.raises(UserError, match=r"store\.json is not .* it does not match its checksum"):
            LabelStore(tmp_path / "s", catalog, None)
    del right["checksum"]  # earlier versions wrote none
    description.write_text(json.dumps(right))
    assert (LabelStore(tmp_path / "s", catalog, None).read(4)[0] == stored[0][4]).all()
    absurd = [{"shard_rows": 4}, {"shard_rows": 0}, {"shard_rows": "3"}, {"maps": 10**12}, {"maps": None}]
    absurd += [{"ids": "int17"}, {"top": 0}, {"width": []}, {"classes": "3"}, {"shards": 3}, {"geometry": 3}]
    for text in (*(json.dumps(right | changes) for changes in absurd), "[" * 100_000, "[]", "3"):
        description.write_text(text)
        with pytest.raises(UserError, match=r"store\.json is not the metadata of a label store"):
            LabelStore(tmp_path / "s", catalog, None)


def test_threads_read_the_same_and_no_descriptor_stays_open(tmp_path):
    catalog = catalog_of(tmp_path, *(f"a/{number}.jpg" for number in range(60)))
    scores, _ = random_store(tmp_path / "s", catalog, shard_rows=1)
    store = LabelStore(tmp_path / "s", catalog, None)
    with ThreadPoolExecutor(8) as threads:
        indices = np.random.default_rng(0).integers(0, 60, 2000).tolist()
        read = list(threads.map(store.read, indices))
    assert all((found[0] == scores[index]).all() for index, found in zip(indices, read, strict=True))
    assert open_files_under(tmp_path) == 0


def test_other_folders_are_recognised_or_refused(tmp_path, catalog, stored):
    folder = publish(tmp_path / "maps", catalog)
    assert isinstance(open_labels(str(folder), catalog, None), PublishedMaps)
    with pytest.raises(UserError, match=r"there is no folder .*nowhere\. --token-label-data takes"):
        open_labels(str(tmp_path / "nowhere"), catalog, None)
    description = tmp_path / "s" / "store.json"
    unfinished = description.rename(description.with_name("making.json"))
    with pytest.raises(UserError, match=r"is unfinished\. Run"):
        open_labels(str(tmp_path / "s"), catalog, None)
    description.write_text(json.dumps(json.loads(unfinished.read_text()) | {"version": 2}))
    with pytest.raises(UserError, match="has format version 2, this program reads 1"):
        open_labels(str(tmp_path / "s"), catalog, None)
