"""Axes and charts of the report: round ticks, points where they belong."""

import json
import re

import numpy as np
import pytest

from horovod_volo.report.chart import Chart, Curve, draw, linear_axis, log_axis
from horovod_volo.report.quantities import Quantity
from tests.unit.parsed_page import ParsedPage


@pytest.mark.parametrize("is_log", [False, True])
def test_points_are_where_the_axes_say(is_log: bool) -> None:
    random = np.random.default_rng(0)
    points = list(zip(range(1, 9), (10 ** random.uniform(-2, 1, size=8)).tolist(), strict=True))
    quantity, curves = Quantity("Title", unit="units"), (Curve("run", points),)
    page = ParsedPage(draw(Chart("Title", quantity, "epochs", curves, is_log)))
    values = [y for _, y in points]
    axis = log_axis(values, 5) if is_log else linear_axis(values, 5)
    paths = [found["d"] for tag, found in page.elements if tag == "path"]
    assert len(paths) == 2
    grids = [found["data-box"] for _, found in page.elements if "data-box" in found]
    for grid, path in zip(grids, paths, strict=True):
        left, top, right, bottom = map(float, grid.split())
        expected = [
            (left + (right - left) * x / 8, bottom - (bottom - top) * axis.place(y)) for x, y in points
        ]
        places = re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)
        assert np.array(places, float) == pytest.approx(np.array(expected), abs=0.11)
    (figure,) = [found for tag, found in page.elements if tag == "figure"]
    (said,) = json.loads(figure["data-points"])["curves"]
    assert said["y"] == [f"{y:#.4g} units" for y in values]
