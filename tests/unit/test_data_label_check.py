"""A check counts what there is, finds what is damaged, and compares the teacher with the folders."""

from __future__ import annotations

import numpy as np
import pytest
from label_samples import catalog_of, make_store, random_store

from horovod_volo.data.labels.check import check_store
from horovod_volo.data.labels.keys import keys_of
from horovod_volo.data.labels.probability import best_classes, probabilities
from horovod_volo.labels import main

NAMES = tuple(f"{name}/{number}.jpg" for name in "abcd" for number in range(3))


@pytest.fixture
def catalog(tmp_path):
    return catalog_of(tmp_path, *NAMES)


def silent(done, total):
    """Take no notice of progress."""


def test_probabilities_are_those_of_a_dense_softmax():
    random = np.random.default_rng(0)
    scores = random.normal(0, 4, (6, 3, 2, 2)).astype(np.float16)
    ids = np.stack([random.permutation(10)[:3] for _ in range(24)]).reshape(6, 2, 2, 3).transpose(0, 3, 1, 2)
    shares, best = probabilities(scores, 10), best_classes(scores, ids, 10)
    for image in range(6):
        sums = np.zeros(10)
        for row, column in np.ndindex(2, 2):
            dense = np.zeros(10)
            dense[ids[image, :, row, column]] = scores[image, :, row, column]
            soft = np.exp(dense) / np.exp(dense).sum()
            named = soft[ids[image, :, row, column]]
            np.testing.assert_allclose(shares[image, :, row, column], named, rtol=1e-5)
            sums[ids[image, :, row, column]] += named
        assert best[image] == sums.argmax()


def test_logits_too_high_for_an_exponential_are_no_trouble():
    assert probabilities(np.full((1, 1, 1), 60000, np.float16), 5) == 1
    assert probabilities(np.full((1, 1, 1), -60000, np.float16), 5) == 0


def test_images_and_maps_are_counted(tmp_path, catalog):
    keys = keys_of(catalog)
    ids = np.zeros((12, 2, 3, 4), np.int64)
    ids[:, 0] = catalog.targets[:, None, None]
    ids[:, 1] = (catalog.targets[:, None, None] + 1) % 4
    scores = np.zeros(ids.shape, np.float16)
    scores[:, 0], scores[:, 1] = 5, 1
    scores[4:6, 0], scores[4:6, 1] = 1, 5  # the teacher errs twice
    ids[7] = -1
    keys[9:] = ["d/no image", "d/nor this", "d/2"]
    make_store(tmp_path / "s", keys, scores, ids, classes=4)
    found = check_store(tmp_path / "s", catalog, silent)
    assert (found.missing, found.damage) == (1, [])
    assert (found.images_without_map, found.maps_without_image) == (3, 2)  # the missing one, and two of d
    assert (found.agreeing, found.with_image) == (7, 9)


def damage_of(store, catalog):
    return " ".join(check_store(store, catalog, silent).damage)


def test_damage_is_found(tmp_path, catalog):
    scores, ids = random_store(tmp_path / "s", catalog)
    shard = tmp_path / "s" / "maps-00002.safetensors"
    content = shard.read_bytes()
    assert damage_of(tmp_path / "s", catalog) == ""
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    assert f"{shard} has another checksum" in damage_of(tmp_path / "s", catalog)
    shard.write_bytes(content[:200])
    assert f"the shard {shard} of label maps cannot be read" in damage_of(tmp_path / "s", catalog)
    shard.unlink()
    assert str(shard) in damage_of(tmp_path / "s", catalog)
    shard.write_bytes(content)
    (tmp_path / "s" / "keys.txt").write_text("a/1\n")
    assert "keys.txt is missing or has another checksum" in damage_of(tmp_path / "s", catalog)

    scores[4, 0, 0, 0] = np.inf
    ids[5, 1, 2, 3] = 4
    make_store(tmp_path / "odd", keys_of(catalog), scores, ids, classes=4)
    assert "maps-00001.safetensors has 2 maps with logits" in damage_of(tmp_path / "odd", catalog)


def test_the_command_prints_a_table(tmp_path, catalog, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    random_store(tmp_path / "s", catalog)
    assert main(["verify", "s", "--data", "."]) == 0
    told = capsys.readouterr().out
    assert "maps                   12, and 0 rows without a map\n" in told
    assert "of a map               2 classes in 3 x 4 cells\n" in told
    assert " % of 12 maps: " in told
    assert "damage                 none\n" in told
    (tmp_path / "s" / "maps-00001.safetensors").write_bytes(b"")
    assert main(["verify", "s"]) == 1
    said = capsys.readouterr()
    assert "damage                 2 found" in said.out
    assert "maps-00001.safetensors" in said.err
