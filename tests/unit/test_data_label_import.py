"""Published maps become a store: whole, resumable shard by shard, and with nothing damaged left unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from label_samples import catalog_of, publish, published_map, save

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.import_maps import import_labels
from horovod_volo.data.labels.published_maps import PublishedMaps
from horovod_volo.data.labels.store import LabelStore
from horovod_volo.labels import main

NAMES = tuple(f"{name}/{number}.x.jpg" for name in "abc" for number in range(4))


def packed(source: Path, store: Path, catalog: Catalog | None = None, **how):
    """Import with four maps to a shard; return what was told of problems and of progress."""
    told = []
    options = {"classes": 0, "workers": 1, "bad_samples_end_it": True, "shard_rows": 4, "tell": print} | how
    maps, problems = import_labels(
        source, store, catalog, progress=lambda *done: told.append(done), **options
    )
    assert told[-1] == (maps, maps)
    return problems, told


@pytest.fixture
def catalog(tmp_path):
    return catalog_of(tmp_path, *NAMES)


@pytest.fixture
def source(tmp_path, catalog):
    return publish(tmp_path / "maps", catalog)


@pytest.mark.parametrize(("listed", "workers"), [("by the tree", 1), ("by the catalog", 2)])
def test_the_store_holds_what_the_tree_holds(tmp_path, catalog, source, listed, workers):
    of_images = catalog if listed == "by the catalog" else None
    assert packed(source, tmp_path / "s", of_images, workers=workers)[0] == []
    published, store = PublishedMaps(source, catalog), LabelStore(tmp_path / "s", catalog, None)
    assert store.facts.catalog == (catalog.digest if of_images else "")
    assert store.size == published.size
    for index in range(len(catalog)):
        for ours, theirs in zip(store.read(index), published.read(index), strict=True):
            assert np.array_equal(ours, theirs)
    left = {path.name for path in (tmp_path / "s").iterdir()}
    assert left == {"store.json", "keys.txt", *(f"maps-0000{number}.safetensors" for number in range(3))}


def test_only_the_maps_of_the_images_are_packed(tmp_path, catalog, source):
    save(published_map(classes=3), source / "a" / "stranger.pt")
    packed(source, tmp_path / "s", catalog)
    assert "stranger" not in (tmp_path / "s" / "keys.txt").read_text()


def test_damage_is_named_and_what_was_whole_is_kept(tmp_path, catalog, source):
    save(published_map(height=7, classes=3), source / "a" / "1.pt")
    (source / "c" / "2.pt").unlink()
    whole = (source / "c" / "3.pt").read_bytes()
    (source / "c" / "3.pt").write_bytes(whole[:100])
    problems, _ = packed(source, tmp_path / "s", catalog)
    assert [problem.split("label map ")[1].split(" ")[0] for problem in problems] == [
        str(source / "a" / "1.pt"),
        str(source / "c" / "2.pt"),
        str(source / "c" / "3.pt"),
    ]
    with pytest.raises(UserError, match=r"store\.json does not describe a label store"):
        LabelStore(tmp_path / "s", catalog, None)
    before = (tmp_path / "s" / "maps-00001.safetensors").stat().st_mtime_ns
    publish(source, catalog)
    problems, told = packed(source, tmp_path / "s", catalog)
    assert problems == []
    assert told[0] == (4, 12)
    assert (tmp_path / "s" / "maps-00001.safetensors").stat().st_mtime_ns == before
    store = LabelStore(tmp_path / "s", catalog, None)
    assert np.array_equal(store.read(11)[0], published_map(11)[0].numpy())


def test_damaged_maps_can_be_left_out(tmp_path, catalog, source):
    (source / "b" / "0.pt").write_bytes(b"")
    problems, _ = packed(source, tmp_path / "s", catalog, bad_samples_end_it=False)
    assert len(problems) == 1
    facts = LabelStore(tmp_path / "s", catalog, None).facts
    assert [shard.missing for shard in facts.shards] == [0, 1, 0]


def test_a_shard_that_has_changed_since_is_made_again(tmp_path, catalog, source):
    (source / "c" / "3.pt").write_bytes(b"")
    packed(source, tmp_path / "s", catalog)
    shard = tmp_path / "s" / "maps-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    publish(source, catalog)
    (tmp_path / "s" / ".maps-00000.safetensors.x.partial").touch()  # what a killed attempt leaves
    assert packed(source, tmp_path / "s", catalog)[1][0] == (4, 12)
    assert not list((tmp_path / "s").glob(".*"))
    assert np.array_equal(LabelStore(tmp_path / "s", catalog, None).read(3)[0], published_map(3)[0].numpy())


def test_another_import_does_not_go_on_with_this_one(tmp_path, catalog, source):
    (source / "c" / "3.pt").write_bytes(b"")
    packed(source, tmp_path / "s", catalog)
    with pytest.raises(UserError, match=r"unfinished store made from something else .*classes was 3, is 900"):
        packed(source, tmp_path / "s", catalog, classes=900)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["import", "nowhere", "s"], "error: there is no folder nowhere. Name the folder"),
        (["import", "empty", "s"], "error: empty has no label maps. Name the folder"),
        (["import", "maps", "maps"], "error: maps holds other files. Name a folder that is empty"),
        (["verify", "maps"], "error: maps/store.json does not describe a label store"),
        (
            ["show", "maps", ".", "a/77", "x.png"],
            "has no image a/77. Name it as CLASS/IMAGE, for example a/0",
        ),
        (["show", "maps", ".", "12", "x.png"], "there is no image 12: the last one is 11."),
    ],
)
def test_mistakes_are_told_in_one_message(tmp_path, catalog, source, arguments, told, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_the_command_says_what_cannot_be_used(tmp_path, catalog, source, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (source / "b" / "0.pt").write_bytes(b"")
    assert main(["import", "maps", "s", "--workers", "1"]) == 1
    told = capsys.readouterr().err
    assert "the label map maps/b/0.pt cannot be read" in told
    assert "error: 1 of 12 maps cannot be used; s is not finished. Mend them" in told
    assert main(["import", "maps", "s", "--workers", "1", "--bad-samples", "skip"]) == 0
    assert capsys.readouterr().out == "s: 11 maps, 1 left out\n"


def test_the_command_packs(tmp_path, catalog, source, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["import", "maps", "s", "--data", ".", "--workers", "1"]) == 0
    assert capsys.readouterr().out == "s: 12 maps, 0 left out\n"
    assert json.loads((tmp_path / "s" / "store.json").read_text())["classes"] == 3
    assert main(["import", "maps", "s"]) == 2
    assert "is a whole label store already" in capsys.readouterr().err
