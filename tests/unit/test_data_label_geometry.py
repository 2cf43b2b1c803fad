"""What a label map covers of its image: spelled, recorded, or assumed where nobody told and then said."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from coded_images import place_coded
from label_samples import catalog_of, make_store, publish

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
from torchvision.transforms.functional import center_crop, resize

from horovod_volo.core.errors import UserError
from horovod_volo.data.labels.geometry import PUBLISHED, WHOLE, MapGeometry
from horovod_volo.data.labels.keys import keys_of
from horovod_volo.data.labels.published_maps import PublishedMaps
from horovod_volo.data.labels.source import geometry_remark, open_labels
from horovod_volo.data.labels.store import LabelStore, read_facts
from horovod_volo.data.labels.store_writer import begin
from horovod_volo.labels import main

NAMES = tuple(f"{name}/{number}.jpg" for name in "ab" for number in range(2))


@pytest.fixture
def catalog(tmp_path):
    return catalog_of(tmp_path, *NAMES)


@pytest.mark.parametrize("text", ["whole", "centre-crop:576:576", "centre-crop:256:224"])
def test_a_geometry_is_read_as_it_is_written(text):
    assert str(MapGeometry.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "Whole", "centre-crop", "centre-crop:576", "centre-crop:0:576", "centre-crop:576:-1"]
)
def test_other_spellings_are_refused_with_the_right_one(text):
    with pytest.raises(UserError, match=r"Give --map-geometry whole, or centre-crop:RESIZE:SIZE"):
        MapGeometry.parse(text)


@pytest.mark.parametrize("resize_to", [96, 73])
@pytest.mark.parametrize("size", [96, 73, 64, 110, 131])
def test_what_is_covered_is_what_torchvision_cuts(resize_to, size):
    """On images whose colours tell the place: the cut's first and last pixels are where the fractions say.

    Nothing is neglected but how finely colours can tell: half a step of 255, and the filter at the edges.
    """
    for height, width in itertools.product([67, 100, 211], [80, 201]):
        image = torch.from_numpy(np.array(place_coded(width, height))).permute(2, 0, 1).float()
        cut = center_crop(resize(image, resize_to, antialias=True), size).numpy() / 255
        ((top, left, tall, wide),) = MapGeometry(resize_to, size).covered(np.array([[height, width]]))
        steps = (np.arange(size) + 0.5) / size
        for wanted, shown in ((top + tall * steps, cut[1]), (left + wide * steps, cut[0].T)):
            inside = (wanted > 0.02) & (wanted < 0.98)  # black beyond the image, and the filter at its edge
            middle = shown[:, size // 2]
            assert np.abs(middle - wanted)[inside].max() < 0.5 / 255 + 0.002
            assert (middle[(wanted < 0) | (wanted > 1)] == 0).all()


def test_a_whole_image_is_covered_exactly():
    assert WHOLE.covered(np.array([[333, 500], [7, 5]])).tolist() == [[0, 0, 1, 1]] * 2


def test_published_maps_are_assumed_to_be_centre_crops(tmp_path, catalog):
    folder = str(publish(tmp_path / "maps", catalog, height=3, width=3))
    maps = PublishedMaps(folder, catalog)
    assert (maps.geometry, maps.geometry_assumed) == (PUBLISHED, True)
    (remark,) = geometry_remark(folder, maps)
    assert "assumed to cover the image's centre crop (centre-crop:576:576): the published" in remark
    assert f"tools/labels verify {folder} --data DATA_DIR --teacher NAME" in remark
    stated = open_labels(folder, catalog, None, WHOLE)
    assert (stated.geometry, geometry_remark(folder, stated)) == (WHOLE, [])


def test_oblong_maps_are_assumed_to_be_of_whole_images(tmp_path, catalog):
    maps = PublishedMaps(publish(tmp_path / "maps", catalog, height=3, width=4), catalog)
    assert (maps.geometry, maps.geometry_assumed) == (WHOLE, True)
    assert "they are not square" in geometry_remark("maps", maps)[0]


def test_a_folder_may_tell_what_its_maps_cover(tmp_path, catalog):
    folder = publish(tmp_path / "maps", catalog, height=3, width=3)
    (folder / "map_geometry.txt").write_text("centre-crop:256:224\n")
    maps = PublishedMaps(folder, catalog)
    assert (maps.geometry, maps.geometry_assumed) == (MapGeometry(256, 224), False)
    stated = open_labels(str(folder), catalog, None, WHOLE)
    assert geometry_remark("maps", stated) == [
        "the label maps in maps are recorded to cover the image's centre crop (centre-crop:256:224), and are "
        "taken to cover the whole image here"
    ]
    assert geometry_remark("maps", open_labels(str(folder), catalog, None, MapGeometry(256, 224))) == []
    (folder / "map_geometry.txt").write_text("center\n")
    with pytest.raises(UserError, match=r"map_geometry\.txt: 'center' is no geometry"):
        PublishedMaps(folder, catalog)


def imported(arguments, capsys):
    """Import maps; return the recorded facts and what was said."""
    assert main(["import", "maps", "s", "--workers", "1", *arguments]) == 0
    return json.loads(Path("s/store.json").read_text()), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "recorded", "assumed"),
    [
        ([], "centre-crop:576:576", True),
        (["--map-geometry", "whole"], "whole", False),
        (["--map-geometry", "centre-crop:256:224"], "centre-crop:256:224", False),
    ],
)
def test_an_import_records_what_maps_cover(
    tmp_path, catalog, arguments, recorded, assumed, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "maps", catalog, height=3, width=3)
    facts, said = imported(arguments, capsys)
    assert (facts["geometry"], facts["geometry_assumed"]) == (recorded, assumed)
    assert ("note: a label map in s is assumed to cover" in said) == assumed
    store = LabelStore("s", catalog, None)
    assert (str(store.geometry), store.geometry_assumed) == (recorded, assumed)
    assert main(["verify", "s"]) == 0
    told = capsys.readouterr().out
    assert (
        f"a map covers           {MapGeometry.parse(recorded).described}{', as is assumed' * assumed}\n"
        in told
    )


def test_a_wrong_geometry_is_a_mistake(tmp_path, catalog, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "maps", catalog)
    assert main(["import", "maps", "s", "--map-geometry", "middle"]) == 2
    assert (
        "error: 'middle' is no geometry of label maps. Give --map-geometry whole" in capsys.readouterr().err
    )
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("written", "shape", "read"),
    [
        ("unknown", (3, 3), "centre-crop:576:576"),
        ("unknown", (3, 4), "whole"),
        ("centre-crop", (3, 3), "centre-crop:576:576"),
    ],
)
def test_a_store_of_an_earlier_version_is_read_as_it_was_meant(tmp_path, catalog, written, shape, read):
    """Such a store has no word of an assumption either, and says "unknown" where maps were imported."""
    ids = np.zeros((4, 1, *shape), np.int64)
    make_store(tmp_path / "s", keys_of(catalog), np.ones(ids.shape, np.float16), ids, classes=2)
    description = tmp_path / "s" / "store.json"
    facts = json.loads(description.read_text())
    del facts["geometry_assumed"]
    description.write_text(json.dumps(facts))
    store = LabelStore(tmp_path / "s", catalog, None)
    assert (store.geometry, store.geometry_assumed) == (WHOLE, False)
    description.write_text(json.dumps(facts | {"geometry": written}))
    store = LabelStore(tmp_path / "s", catalog, None)
    assert (str(store.geometry), store.geometry_assumed) == (read, True)
    assert len(geometry_remark("s", store)) == 1


def test_an_import_that_an_earlier_version_began_is_gone_on_with(tmp_path, catalog):
    how = {"classes": 2, "size": (1, 3, 3), "teacher": "unknown", "catalog": ""}
    making = begin(tmp_path / "s", keys_of(catalog), geometry="unknown", **how)
    begun = read_facts(tmp_path / "s" / "making.json")
    assert begun == replace(making.facts, geometry="centre-crop:576:576", geometry_assumed=True)
    begin(tmp_path / "s", keys_of(catalog), geometry="centre-crop:576:576", geometry_assumed=True, **how)
    with pytest.raises(UserError, match="geometry was centre-crop:576:576, is whole"):
        begin(tmp_path / "s", keys_of(catalog), geometry="whole", **how)


@pytest.mark.parametrize("cells", [1, 9, 14, 18])
def test_maps_of_any_square_are_packed_and_read(tmp_path, catalog, cells, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "maps", catalog, height=cells, width=cells)
    facts, _ = imported([], capsys)
    assert (facts["height"], facts["width"]) == (cells, cells)
    store, published = LabelStore("s", catalog, None), PublishedMaps("maps", catalog)
    for index in range(len(catalog)):
        for ours, theirs in zip(store.read(index), published.read(index), strict=True):
            assert np.array_equal(ours, theirs)
