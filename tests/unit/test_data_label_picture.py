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
    ("geometry", "left", "width", "border"),
    [
        (WHOLE, 0, 900, 0),
        (MapGeometry(576, 576), 225, 450, 0),
        (MapGeometry(256, 128), 337.5, 225, -112.5),
        (MapGeometry(100, 150), 112.5, 675, 112.5),  # a square taller than the image
    ],
)
def test_cells_have_the_colour_of_their_class(geometry, left, width, border):
    ids = np.array([[[4, 4, 7], [4, 2, 2]], [[1, 1, 1], [1, 1, 1]]], np.int16)  # (k, rows, columns)
    scores = np.zeros(ids.shape, np.float16)
    scores[0] = 99
    classes = [f"class {number}" for number in range(10)]
    picture = draw_labels(Image.new("RGB", (600, 300), "white"), (scores, ids), geometry, classes, ("title",))
    # The image is enlarged to 900 x 450; a cell is seen inside its outline, beside its text.
    top = picture.height - MARGIN + min(0, border) - (450 + 2 * border)
    color = {4: PALETTE[0], 2: PALETTE[1], 7: PALETTE[2]}
    for row, column in np.ndindex(2, 3):
        place = (MARGIN + left + column * width / 3 + 3, top + row * (450 + 2 * border) / 2 + 3)
        white = 0 if border > 0 and row == 0 else 255  # the border is black
        expected = [white + MAX_TINT * (part - white) for part in color[ids[0, row, column]]]
        assert picture.getpixel(tuple(map(round, place))) == pytest.approx(expected, abs=2), (row, column)


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
