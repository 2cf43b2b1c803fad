"""Published label maps are read as saved, and refused with a reason if they are invalid."""

from pathlib import Path

import numpy as np
import pytest
import torch
from label_samples import catalog_of, publish, published_map, save

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.token_labels.published_maps import PublishedMaps, read_published_map


def test_maps_are_read_by_key_as_saved(tmp_path):
    catalog = catalog_of(tmp_path, "a.b/photo.final.png", "a.b/plain.jpg", "c/n01_12.JPEG")
    maps = PublishedMaps(publish(tmp_path / "maps", catalog), catalog)
    assert maps.map_shape == (5, 6, 9)
    for index in range(3):
        stored = published_map(index, classes=2).numpy()
        scores, ids = maps.read(index)
        assert (scores.dtype, ids.dtype) == (np.float16, np.int32)
        assert (scores == stored[0]).all()
        assert (ids == stored[1].astype(int)).all()


def test_class_numbers_beyond_fp16_are_exact_in_fp32_files(tmp_path):
    stored = torch.stack([torch.zeros(1, 2, 2), torch.tensor([[[2049.0, 21841.0], [40001.0, 0.0]]])])
    save(stored, tmp_path / "1.pt")
    assert read_published_map(tmp_path / "1.pt", 40002)[1].tolist() == [[[2049, 21841], [40001, 0]]]


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.half, 2047), (torch.bfloat16, 255), (torch.float8_e4m3fn, 15)]
)
def test_class_numbers_that_the_type_rounds_are_refused(tmp_path, dtype, largest):
    for number in (largest, largest + 4):
        save(torch.tensor([0.0, number]).view(2, 1, 1, 1).to(dtype), tmp_path / f"{number}.pt")
    assert read_published_map(tmp_path / f"{largest}.pt", 21841)[1].item() == largest
    with pytest.raises(BadSampleError, match=f"from {largest + 1} on in {dtype}, which rounds them"):
        read_published_map(tmp_path / f"{largest + 4}.pt", 21841)


def test_images_that_share_a_map_are_refused(tmp_path):
    folder = publish(tmp_path / "maps", catalog_of(tmp_path, "a/1.jpg", "a/2.jpg"))
    catalog = catalog_of(tmp_path, "a/2.png")
    with pytest.raises(UserError, match=r"a/2\.jpg and a/2\.png in .* have the same label map, because"):
        PublishedMaps(folder, catalog)


@pytest.mark.parametrize("length", [0, 10, 300])
def test_a_truncated_map_is_reported(tmp_path, length):
    save(published_map(), tmp_path / "1.pt")
    whole = (tmp_path / "1.pt").read_bytes()
    (tmp_path / "1.pt").write_bytes(whole[:length])
    with pytest.raises(BadSampleError, match=r"label map .*1\.pt cannot be read: "):
        read_published_map(tmp_path / "1.pt", 1000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(5, 6, 9), r"holds \[5, 6, 9\], not a tensor \[2, k, height, width\]"),
        (torch.zeros(3, 5, 6, 9), r"holds \[3, 5, 6, 9\]"),
        (torch.zeros(2, 5, 0, 9), r"holds \[2, 5, 0, 9\]"),
        ({"logits": torch.zeros(2, 5, 6, 9)}, r"holds dict"),
        (torch.full((2, 5, 6, 9), -1.0), r"not logits or not class numbers"),
        (torch.full((2, 5, 6, 9), 1.5), r"not logits or not class numbers"),
        (torch.full((2, 5, 6, 9), torch.nan), r"not logits or not class numbers"),
        (torch.stack([torch.full((1, 2, 2), 1e6), torch.zeros(1, 2, 2)]), r"not logits or not class numbers"),
        (torch.full((2, 5, 6, 9), 10.0), r"names class 10, but there are 10 classes"),
        (Path("an object whose loading would run code"), "cannot be read"),
    ],
)
def test_an_invalid_map_is_reported(tmp_path, content, message):
    save(content, tmp_path / "1.pt")
    with pytest.raises(BadSampleError, match=rf"label map .*1\.pt .*{message}"):
        read_published_map(tmp_path / "1.pt", 10)


def test_a_class_without_any_map_is_refused(tmp_path):
    catalog = catalog_of(tmp_path, "a/1.jpg", "b/1.jpg", "b/2.jpg", "c/1.jpg")
    folder = publish(tmp_path / "maps", catalog)
    (folder / "b" / "1.pt").unlink()
    maps = PublishedMaps(folder, catalog)
    maps.read(2)
    with pytest.raises(BadSampleError, match=r"no label map .*b/1\.pt"):
        maps.read(1)
    (folder / "b" / "2.pt").unlink()
    with pytest.raises(
        UserError, match=r"no label map .*b/1\.pt, nor one for any other image of class b\. --tok"
    ):
        PublishedMaps(folder, catalog)


def test_the_shape_is_read_from_the_first_intact_map(tmp_path):
    catalog = catalog_of(tmp_path, "a/1.jpg", "a/2.jpg")
    folder = publish(tmp_path / "maps", catalog)
    (folder / "a" / "1.pt").write_bytes(b"")
    maps = PublishedMaps(folder, catalog)
    assert maps.map_shape == (5, 6, 9)
    save(published_map(height=7, classes=1), folder / "a" / "2.pt")
    with pytest.raises(BadSampleError, match=r"a/2\.pt has the shape \(5, 7, 9\), the others have"):
        maps.read(1)


def test_maps_for_other_classes_are_refused_when_opened(tmp_path):
    catalog = catalog_of(tmp_path, "a/1.jpg", "a/2.jpg")
    save(published_map(classes=1000), tmp_path / "maps" / "a" / "1.pt")
    with pytest.raises(
        UserError,
        match=r"the first problem: .* but there are 1 classes: it was made for other classes\. Name",
    ):
        PublishedMaps(tmp_path / "maps", catalog)
