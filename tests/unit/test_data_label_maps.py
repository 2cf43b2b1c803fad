"""Published label maps are read as saved, refused with a reason if invalid, and imported shard by shard."""

from pathlib import Path

import numpy as np
import pytest
import torch
from label_samples import catalog_of, publish, published_map, save

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.labelling.import_maps import import_labels
from horovod_volo.labels import main
from horovod_volo.token_labels.geometry import MapGeometry
from horovod_volo.token_labels.published_maps import PublishedMaps, read_published_map
from horovod_volo.token_labels.store import LabelStore


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
    with pytest.raises(UserError, match=r"no label map .*b/1\.pt, .* of class b\. --tok"):
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
    with pytest.raises(UserError, match=r"there are 1 classes: .* other classes\. Name"):
        PublishedMaps(tmp_path / "maps", catalog)


NAMES = tuple(f"{name}/{number}.x.jpg" for name in "abc" for number in range(4))


def run_import(source: Path, store: Path, catalog: Catalog, **changed):
    """Import with four maps per shard; return the problems and the calls of `progress`."""
    calls = []
    options = {"workers": 1, "fail_on_bad_samples": True, "shard_rows": 4, "warn": print} | changed
    options["progress"] = lambda *done: calls.append(done)
    maps, problems = import_labels(source, store, catalog, **options)
    assert calls[-1] == (maps, maps)
    return problems, calls


@pytest.fixture
def catalog(tmp_path):
    return catalog_of(tmp_path, *NAMES)


@pytest.fixture
def source(tmp_path, catalog):
    return publish(tmp_path / "maps", catalog)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_store_contains_the_maps_of_the_images(tmp_path, catalog, source, workers):
    save(published_map(classes=3), source / "a" / "no_image.pt")
    assert run_import(source, tmp_path / "s", catalog, workers=workers)[0] == []
    published, store = PublishedMaps(source, catalog), LabelStore(tmp_path / "s", catalog, None)
    assert store.metadata.catalog == catalog.digest
    assert store.map_shape == published.map_shape
    for index in range(len(catalog)):
        for ours, theirs in zip(store.read(index), published.read(index), strict=True):
            assert np.array_equal(ours, theirs)
    assert "no_image" not in (tmp_path / "s" / "keys.txt").read_text()
    shards = [f"maps-0000{number}.safetensors" for number in range(3)]
    left = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert left == ["keys.txt", *shards, "store.json"]


def test_images_that_share_a_map_are_refused(tmp_path, catalog, source):
    with_another = catalog_of(tmp_path, "b/1.y.jpg")
    with pytest.raises(UserError, match=r"b/1\.x\.jpg and b/1\.y\.jpg in .* have the same label map"):
        run_import(source, tmp_path / "s", with_another)
    run_import(source, tmp_path / "s", catalog)
    with pytest.raises(UserError, match=r"b/1\.x\.jpg and b/1\.y\.jpg in .* have the same label map"):
        LabelStore(tmp_path / "s", with_another, None)


def test_an_import_reports_damage_and_is_resumed(tmp_path, catalog, source):
    save(published_map(height=7, classes=3), source / "c" / "1.pt")
    (source / "c" / "2.pt").unlink()
    (source / "c" / "3.pt").write_bytes((source / "c" / "3.pt").read_bytes()[:100])
    problems, _ = run_import(source, tmp_path / "s", catalog)
    found = [problem.split("label map ")[1].split(" ")[0] for problem in problems]
    assert found == [str(source / "c" / f"{number}.pt") for number in (1, 2, 3)]
    with pytest.raises(UserError, match=r"store\.json is not the metadata of a label store"):
        LabelStore(tmp_path / "s", catalog, None)
    with pytest.raises(UserError, match=r"with other metadata .*geometry was whole, is centre-crop:9:9"):
        run_import(source, tmp_path / "s", catalog, geometry=MapGeometry(9, 9))
    damaged, finished = (tmp_path / "s" / f"maps-0000{number}.safetensors" for number in (0, 1))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    before = finished.stat().st_mtime_ns
    (tmp_path / "s" / ".maps-00000.safetensors.x.partial").touch()  # the temporary file of a killed attempt
    publish(source, catalog)
    problems, calls = run_import(source, tmp_path / "s", catalog, fail_on_bad_samples=False)
    assert (problems, calls[0]) == ([], (4, 12))  # the maps of the finished shard, which is left as it is
    assert finished.stat().st_mtime_ns == before
    assert not list((tmp_path / "s").glob(".*"))
    store = LabelStore(tmp_path / "s", catalog, None)
    for index in (3, 11):
        assert np.array_equal(store.read(index)[0], published_map(index)[0].numpy())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "nowhere", "s", "--data", "."], "there is no label map nowhere/a/0.pt"),
        (["import", "maps", "maps", "--data", "."], "maps is a file, or holds other files"),
        (["verify", "maps"], "maps/store.json"),
        (["show", "maps", ".", "a/77", "x.png"], "no image a/77. Give CLASS/IMAGE"),
        (["show", "maps", ".", "12", "x.png"], "or an index from 0 to 11"),
    ],
)
def test_user_errors_are_one_message(tmp_path, catalog, source, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_command_lists_maps_that_cannot_be_used(tmp_path, catalog, source, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (source / "b" / "0.pt").write_bytes(b"")
    assert main(["import", "maps", "s", "--data", ".", "--workers", "1"]) == 1
    printed = capsys.readouterr().err
    assert "maps/b/0.pt" in printed
    assert "s is not finished" in printed
    assert main(["import", "maps", "s", "--data", ".", "--workers", "1", "--bad-samples", "skip"]) == 0
    assert capsys.readouterr().out == "s: 11 maps, 1 left out\n"
    metadata = LabelStore(tmp_path / "s", catalog, None).metadata
    assert metadata.classes == 3
    assert sum(shard.missing for shard in metadata.shards) == 1
    assert main(["import", "maps", "s", "--data", "."]) == 2
    assert "complete label store" in capsys.readouterr().err
