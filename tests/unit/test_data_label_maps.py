"""Label maps come back as they were published, flip as arrays flip, and say what is wrong with them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from horovod_volo.config.errors import UserError
from horovod_volo.data.catalog import Catalog
from horovod_volo.data.label_maps import LabelMaps, flipped


def published_map(k=5, height=6, width=9, highest=1000):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(k, height, width, generator=generator)
    ids = torch.randint(0, highest, (k, height, width), generator=generator)
    return torch.stack([logits, ids.float()]).half()


def save(content, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)


def catalog_of(root, *paths):
    classes = tuple(sorted({path.split("/")[0] for path in paths}))
    targets = np.array([classes.index(path.split("/")[0]) for path in paths])
    return Catalog(root, classes, paths, targets)


@pytest.mark.parametrize(
    ("image", "file"),
    [
        ("n01/n01_12.JPEG", "n01/n01_12.pt"),
        ("a.b/photo.final.png", "a.b/photo.pt"),
        ("a/plain.jpg", "a/plain.pt"),
    ],
)
def test_reads_the_file_named_up_to_the_first_dot(tmp_path, image, file):
    stored = published_map()
    save(stored, tmp_path / file)
    scores, ids = LabelMaps(str(tmp_path)).read(image)
    assert scores.dtype == np.float16
    assert ids.dtype == np.int32
    assert (scores == stored[0].numpy()).all()
    assert (ids == stored[1].numpy().astype(int)).all()


def test_keeps_class_numbers_that_half_precision_cannot_hold(tmp_path):
    stored = torch.stack([torch.zeros(1, 2, 2), torch.tensor([[[2049.0, 21841.0], [40001.0, 0.0]]])])
    save(stored, tmp_path / "a" / "1.pt")
    assert LabelMaps(tmp_path).read("a/1.jpg")[1].tolist() == [[[2049, 21841], [40001, 0]]]


@pytest.mark.parametrize("horizontal", [False, True])
@pytest.mark.parametrize("vertical", [False, True])
def test_flips_rows_and_columns(horizontal, vertical):
    ids = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
    scores = (ids / 2).astype(np.float16)
    turned_scores, turned_ids = flipped(scores, ids, horizontal, vertical)
    for k, row, column in np.ndindex(2, 3, 4):
        source = (k, 2 - row if vertical else row, 3 - column if horizontal else column)
        assert turned_ids[k, row, column] == ids[source]
        assert turned_scores[k, row, column] == scores[source]


def test_a_missing_map_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no label map .*a/1\.pt\. --token-label-data names"):
        LabelMaps(tmp_path).read("a/1.jpg")


@pytest.mark.parametrize("length", [0, 10, 300])
def test_a_short_map_is_named(tmp_path, length):
    save(published_map(), tmp_path / "a" / "1.pt")
    whole = (tmp_path / "a" / "1.pt").read_bytes()
    (tmp_path / "a" / "1.pt").write_bytes(whole[:length])
    with pytest.raises(
        UserError, match=r"cannot read the label map .*a/1\.pt: .* Copy or make this file again"
    ):
        LabelMaps(tmp_path).read("a/1.jpg")


def test_a_map_that_would_run_code_is_refused(tmp_path):
    save(Path("anything"), tmp_path / "a" / "1.pt")
    with pytest.raises(UserError, match=r"cannot read the label map .*a/1\.pt"):
        LabelMaps(tmp_path).read("a/1.jpg")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (torch.zeros(5, 6, 9), r"holds \[5, 6, 9\], not a tensor \[2, k, height, width\]"),
        (torch.zeros(3, 5, 6, 9), r"holds \[3, 5, 6, 9\]"),
        (torch.zeros(2, 5, 0, 9), r"holds \[2, 5, 0, 9\]"),
        ({"logits": torch.zeros(2, 5, 6, 9)}, r"holds dict"),
        (torch.full((2, 5, 6, 9), -1.0), r"no logits or no class numbers"),
        (torch.full((2, 5, 6, 9), 1.5), r"no logits or no class numbers"),
        (torch.full((2, 5, 6, 9), torch.nan), r"no logits or no class numbers"),
    ],
)
def test_an_odd_map_is_named(tmp_path, content, told):
    save(content, tmp_path / "a" / "1.pt")
    with pytest.raises(UserError, match=rf"label map .*a/1\.pt .*{told}"):
        LabelMaps(tmp_path).read("a/1.jpg")


def test_check_looks_at_one_map_of_each_class(tmp_path):
    catalog = catalog_of(tmp_path, "a/1.jpg", "a/2.jpg", "b/1.jpg", "c/1.jpg")
    for name in ("a/1.pt", "b/1.pt", "c/1.pt"):
        save(published_map(), tmp_path / name)
    LabelMaps(tmp_path).check(catalog)
    (tmp_path / "b" / "1.pt").unlink()
    with pytest.raises(UserError, match=r"no label map .*b/1\.pt"):
        LabelMaps(tmp_path).check(catalog)


def test_check_reads_one_map(tmp_path):
    save(torch.zeros(7), tmp_path / "a" / "1.pt")
    with pytest.raises(UserError, match=r"holds \[7\]"):
        LabelMaps(tmp_path).check(catalog_of(tmp_path, "a/1.jpg"))
