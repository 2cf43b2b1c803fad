"""The drawn scenes: reproducible, made at once or not at all, with masks that fit their images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from horovod_volo.core.errors import UserError
from horovod_volo.demo.scene_set import SCENE_CLASSES, main, make_scene_set
from horovod_volo.dense.scene_list import find_layout, list_scenes


def test_a_smaller_set_is_part_of_a_larger_one(tmp_path: Path) -> None:
    make_scene_set(tmp_path / "small", train=4, val=2, side=48)
    make_scene_set(tmp_path / "large", train=9, val=3, side=48)
    files = [file.relative_to(tmp_path / "small") for file in (tmp_path / "small").rglob("*.[jp][pn]g")]
    assert len(files) == 2 * (4 + 2)
    for file in files:
        assert (tmp_path / "small" / file).read_bytes() == (tmp_path / "large" / file).read_bytes()


def test_masks_have_the_sizes_of_images_and_all_classes(tmp_path: Path) -> None:
    make_scene_set(tmp_path / "set", train=12, val=1, side=48)
    scenes = list_scenes(tmp_path / "set", find_layout(tmp_path / "set"), "train")
    assert tuple(scenes.classes) == SCENE_CLASSES
    seen: set[int] = set()
    for index in range(len(scenes)):
        with Image.open(scenes.location(index)) as image:
            seen |= set(np.unique(scenes.read_mask(index, (image.height, image.width))).tolist())
    assert seen == set(range(len(SCENE_CLASSES)))


def test_another_set_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "set"), "--train", "2", "--val", "1"])
    assert capsys.readouterr().out == f"{tmp_path / 'set'}: 2 training and 1 validation images\n"
    make_scene_set(tmp_path / "set", train=2, val=1)
    with pytest.raises(UserError, match="holds another demo set"):
        make_scene_set(tmp_path / "set", train=3, val=1)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "set"), "--train", "3"])
    assert ended.value.code == 2
    assert not list(tmp_path.glob("*partial*"))
