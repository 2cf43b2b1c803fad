"""The demo set and the drawn scenes are reproducible, created atomically and labelled correctly."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coded_images import files_below

from horovod_volo.core.errors import UserError
from horovod_volo.demo.demo_image import CLASSES, GRID
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.demo.scene_set import make_scene_set


@pytest.fixture
def small_set(demo_images: Callable[[int, int], Path]) -> Path:
    return demo_images(45, 20)


def test_layout_is_image_folders_with_balanced_classes_and_maps(small_set: Path) -> None:
    for split, count in (("train", 45), ("val", 20)):
        per_class = Counter(path.parent.name for path in (small_set / split).glob("*/*.jpg"))
        assert per_class.total() == count
        assert sorted(per_class) == list(CLASSES)
        assert max(per_class.values()) - min(per_class.values()) <= 1
    images = {path.relative_to(small_set / "train").with_suffix("") for path in small_set.glob("train/*/*")}
    maps = {path.relative_to(small_set / "token_labels").with_suffix("") for path in small_set.rglob("*.pt")}
    assert images == maps


def test_an_image_depends_only_on_its_number_split_and_seed(small_set: Path, tmp_path: Path) -> None:
    make_demo_set(tmp_path / "smaller", train=12, val=10)
    smaller, larger = files_below(tmp_path / "smaller"), files_below(small_set)
    smaller.pop("demo_set.json")
    assert len(smaller) == 12 + 12 + 10 + 1  # and the file with the geometry of the maps
    assert all(larger[name] == content for name, content in smaller.items())
    make_demo_set(tmp_path / "other", train=10, val=10, seed=1)
    images = [path.read_bytes() for path in [*small_set.rglob("*.jpg"), *(tmp_path / "other").rglob("*.jpg")]]
    assert len(set(images)) == len(images)


def test_a_complete_set_is_left_alone_and_anything_else_is_refused(small_set: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small_set.rglob("*")}
    make_demo_set(small_set, train=45, val=20)
    assert {path: path.stat().st_mtime_ns for path in small_set.rglob("*")} == before
    with pytest.raises(UserError, match=r"holds another demo set.*Delete it"):
        make_demo_set(small_set, train=46, val=20)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "photographs").mkdir(parents=True)
    for name in ("file", "folder"):
        with pytest.raises(UserError, match="is not a demo set"):
            make_demo_set(tmp_path / name, train=10, val=10)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        assert list(tmp_path.glob("set.partial-*/train/checker"))
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        make_demo_set(tmp_path / "set", train=10, val=10)
    assert list(tmp_path.iterdir()) == []


def test_label_maps_have_the_published_format(small_set: Path) -> None:
    for path in small_set.rglob("*.pt"):
        label = torch.load(path, weights_only=True)  # (2, top, rows, columns)
        assert label.dtype == torch.float16
        assert label.shape == (2, 5, GRID, GRID)
        logits, ids = label.float()
        assert (logits[:-1] >= logits[1:]).all()
        assert ids.sort(dim=0).values.diff(dim=0).gt(0).all(), "a class stands twice in a cell"
        assert ids.min() >= 0
        assert ids.max() < len(CLASSES)
        assert torch.equal(ids, ids.round())
        assert CLASSES[int(ids[0][logits[0] == logits[0].max()][0])] == path.parent.name


def test_a_smaller_set_is_part_of_a_larger_one(tmp_path: Path) -> None:
    make_scene_set(tmp_path / "small", train=4, val=2, side=48)
    make_scene_set(tmp_path / "large", train=9, val=3, side=48)
    files = [file.relative_to(tmp_path / "small") for file in (tmp_path / "small").rglob("*.[jp][pn]g")]
    assert len(files) == 2 * (4 + 2)
    for file in files:
        assert (tmp_path / "small" / file).read_bytes() == (tmp_path / "large" / file).read_bytes()
