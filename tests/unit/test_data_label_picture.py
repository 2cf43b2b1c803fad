"""The figure of a sample: the colour of every cell, and which image a name means."""

from __future__ import annotations

import numpy as np
import pytest
from coded_images import write_images
from label_samples import make_store
from PIL import Image

from horovod_volo.labelling.figure import MARGIN, MAX_TINT, draw_labels
from horovod_volo.labels import main
from horovod_volo.monitor.pictures import PALETTE
from horovod_volo.token_labels.geometry import WHOLE, MapGeometry


@pytest.mark.parametrize(
    ("geometry", "height", "dark"),
    [
        (WHOLE, 450, [(0, 0), (1, 0)]),
        (MapGeometry(576, 576), 900, []),
        (MapGeometry(256, 128), 900, []),
        (MapGeometry(100, 150), 900, [(0, 0), (1, 0), (0, 1), (0, 2)]),  # taller than the image
    ],
)
def test_cells_have_the_colour_of_their_class(geometry, height, dark):
    """The left quarter of the image is black, and what is beyond it."""
    ids = np.array([[[4, 4, 7], [4, 2, 2]], [[1, 1, 1], [1, 1, 1]]], np.int16)  # (k, rows, columns)
    scores = np.zeros(ids.shape, np.float16)
    scores[0] = 99
    image = Image.new("RGB", (600, 300), "white")
    image.paste("black", (0, 0, 150, 300))
    picture = draw_labels(image, (scores, ids), geometry, [f"class {n}" for n in range(10)], ("title",))
    color = {4: PALETTE[0], 2: PALETTE[1], 7: PALETTE[2]}
    for row, column in np.ndindex(2, 3):
        below = 12 - height + row * height // 2  # in a cell's corner, beside its text
        shown = picture.getpixel((MARGIN + 12 + column * 300, picture.height - MARGIN + below))
        light = 0 if (row, column) in dark else 255
        expected = [light + MAX_TINT * (part - light) for part in color[ids[0, row, column]]]
        assert shown == pytest.approx(expected, abs=2), (row, column)


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
