"""The check of a label store: maps, damage, agreement with the images' classes; which image is shown."""

import numpy as np
import pytest
from coded_images import write_images
from label_samples import catalog_of, make_store, random_store
from PIL import Image

from horovod_volo.labelling.figure import LINE_HEIGHT, MARGIN, MAX_TINT, draw_labels
from horovod_volo.labelling.verify import best_classes, check_store, probabilities
from horovod_volo.labels import main
from horovod_volo.monitor.pictures import PALETTE
from horovod_volo.token_labels.geometry import PUBLISHED
from horovod_volo.token_labels.keys import catalog_keys

NAMES = tuple(f"{name}/{number}.jpg" for name in "abcd" for number in range(3))


@pytest.fixture
def catalog(tmp_path):
    return catalog_of(tmp_path, *NAMES)


def test_probabilities_are_those_of_a_dense_softmax():
    random = np.random.default_rng(0)
    scores = random.normal(0, 4, (6, 3, 2, 2)).astype(np.float16)
    ids = np.stack([random.permutation(10)[:3] for _ in range(24)]).reshape(6, 2, 2, 3).transpose(0, 3, 1, 2)
    stored, best = probabilities(scores, 10), best_classes(scores, ids, 10)
    for image in range(6):
        sums = np.zeros(10)
        for row, column in np.ndindex(2, 2):
            dense = np.zeros(10)
            dense[ids[image, :, row, column]] = scores[image, :, row, column]
            soft = np.exp(dense) / np.exp(dense).sum()
            named = soft[ids[image, :, row, column]]
            np.testing.assert_allclose(stored[image, :, row, column], named, rtol=1e-5)
            sums[ids[image, :, row, column]] += named
        assert best[image] == sums.argmax()


def test_large_logits_do_not_overflow():
    assert probabilities(np.full((1, 1, 1), 60000, np.float16), 5) == 1
    assert probabilities(np.full((1, 1, 1), -60000, np.float16), 5) == 0


def test_images_and_maps_are_counted(tmp_path, catalog):
    keys = catalog_keys(catalog)
    ids = np.zeros((12, 2, 3, 4), np.int64)
    ids[:, 0] = catalog.targets[:, None, None]
    ids[:, 1] = (catalog.targets[:, None, None] + 1) % 4
    scores = np.zeros(ids.shape, np.float16)
    scores[:, 0], scores[:, 1] = 5, 1
    scores[4:6, 0], scores[4:6, 1] = 1, 5  # two maps whose most probable class is not that of the image
    ids[7] = -1
    keys[9:] = ["d/no image", "d/nor this", "d/2"]
    make_store(tmp_path / "s", keys, scores, ids, classes=4)
    report = check_store(tmp_path / "s", catalog, lambda *_: None)
    assert (report.missing, report.damage) == (1, [])
    # One image has a row without a map, two images have no row.
    assert (report.images_without_map, report.maps_without_image) == (3, 2)
    assert (report.agreeing, report.with_image) == (7, 9)


def damage_of(store, catalog):
    return " ".join(check_store(store, catalog, lambda *_: None).damage)


def test_damage_is_found(tmp_path, catalog, capsys):
    scores, ids = random_store(tmp_path / "s", catalog)
    shard = tmp_path / "s" / "maps-00002.safetensors"
    content = shard.read_bytes()
    assert damage_of(tmp_path / "s", catalog) == ""
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    assert f"{shard}: its checksum" in damage_of(tmp_path / "s", catalog)
    shard.write_bytes(content[:200])
    assert str(shard) in damage_of(tmp_path / "s", catalog)
    shard.unlink()
    assert str(shard) in damage_of(tmp_path / "s", catalog)
    assert main(["verify", str(tmp_path / "s")]) == 1
    assert str(shard) in capsys.readouterr().err
    shard.write_bytes(content)
    (tmp_path / "s" / "keys.txt").write_text("a/1\n")
    assert "keys.txt" in damage_of(tmp_path / "s", catalog)

    scores[4, 0, 0, 0] = np.inf
    ids[5, 1, 2, 3] = 4
    make_store(tmp_path / "invalid", catalog_keys(catalog), scores, ids, classes=4)
    assert "maps-00001.safetensors: 2 maps have logits" in damage_of(tmp_path / "invalid", catalog)


def test_the_command_finds_an_image_by_index_or_name(tmp_path, capsys):
    names = ["a/one.1.png", "a/one.2.png", "b/two.png"]
    write_images(tmp_path, {f"train/{name}": Image.new("L", (40, 30)) for name in names})
    ids = np.array([0, 1, 0]).reshape(3, 1, 1, 1)
    make_store(tmp_path / "s", names, np.ones(ids.shape, np.float16), ids, classes=2, generated=True)
    pictures = {}
    for image in ("0", "1", "b/two", *names):
        assert main(["show", str(tmp_path / "s"), str(tmp_path), image, str(tmp_path / "out.png")]) == 0
        pictures[image] = (tmp_path / "out.png").read_bytes()
    assert pictures["a/one.2.png"] == pictures["1"] != pictures["a/one.1.png"] == pictures["0"]
    assert pictures["b/two"] == pictures["b/two.png"]
    assert pictures["0"].startswith(b"\x89PNG")
    assert main(["show", str(tmp_path / "s"), str(tmp_path), "a/one", str(tmp_path / "out.png")]) == 2
    assert "several images a/one. Give CLASS/IMAGE" in capsys.readouterr().err


def test_cells_have_the_colour_of_their_most_probable_class():
    """A square map of an image that is white there, and twice as wide."""
    image = Image.new("RGB", (600, 300), "white")
    image.paste("black", (0, 0, 150, 300))
    ids, logits = np.array([[[4, 4], [4, 2]], [[1, 1], [1, 1]]]), np.full((2, 2, 2), 20.0)
    logits[1] = 0
    for order in ([0, 1], [1, 0]):
        classes = [str(number) for number in range(10)]
        drawn = np.array(draw_labels(image, (logits[order], ids[order]), PUBLISHED, classes, []))
        cells = drawn[MARGIN + LINE_HEIGHT :, MARGIN:][5:900:450, 5:900:450]  # their corners
        tint = (np.array(cells, float) - 255 * (1 - MAX_TINT)) / MAX_TINT
        first, second = np.array(PALETTE[:2])
        assert np.abs(tint - [[first, first], [first, second]]).max() < 3
