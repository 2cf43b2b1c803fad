"""The figure of a sample: colour, bar and caption of every cell."""

from __future__ import annotations

import numpy as np
import pytest
from coded_images import write_images
from label_samples import make_store
from PIL import Image

from horovod_volo.labelling.figure import BAR_HEIGHT, MARGIN, cell_captions, draw_labels
from horovod_volo.labels import main
from horovod_volo.monitor.pictures import PALETTE, load_font
from horovod_volo.token_labels.geometry import WHOLE, MapGeometry


def drawn(ids, scores, *, size=(600, 300), geometry=WHOLE):
    """Draw the map of a white image of ten classes."""
    maps = np.array(scores, np.float16), np.array(ids, np.int16)
    classes = tuple(f"class {number}" for number in range(10))
    return draw_labels(Image.new("RGB", size, "white"), maps, geometry, classes, ("title", "one", "two"))


def bars(picture, rows, columns, *, left, width, bottom, height):
    """Return the colour at the left end of each cell's bar."""
    return [
        [
            picture.getpixel(
                (
                    round(left + column * width / columns) + 2,
                    round(bottom - height + (row + 1) * height / rows) - BAR_HEIGHT + 2,
                )
            )
            for column in range(columns)
        ]
        for row in range(rows)
    ]


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
    ids = [[[4, 4, 7], [4, 2, 2]], [[1, 1, 1], [1, 1, 1]]]  # (k, rows, columns)
    scores = [[[9, 9, 9], [9, 9, 9]], [[0, 0, 0], [0, 0, 0]]]
    picture = drawn(ids, scores, geometry=geometry)
    assert picture.height - MARGIN > 450  # the image is enlarged to 900 x 450
    lower_edge = picture.height - MARGIN + min(0, border)
    found = bars(picture, 2, 3, left=MARGIN + left, width=width, bottom=lower_edge, height=450 + 2 * border)
    color = {4: PALETTE[0], 2: PALETTE[1], 7: PALETTE[2]}
    assert found == [[color[4], color[4], color[7]], [color[4], color[2], color[2]]]


def test_captions_are_unambiguous():
    classes = ("dog", "a very long name of a dog", "a very long name of a cat", "x" * 40)
    font = load_font(17)
    wide = cell_captions([0, 1], classes, 400, font)
    assert wide == {0: "dog", 1: "a very long name of a dog"}
    assert cell_captions([0, 1], classes, 80, font)[1].endswith("…")
    assert cell_captions([1, 2], classes, 80, font) == {1: "1", 2: "2"}
    assert cell_captions([0, 3], classes, 20, font) == {0: "0", 3: "3"}


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
