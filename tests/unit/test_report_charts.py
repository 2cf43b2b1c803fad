"""Axes and charts of the report: round ticks, points where they belong."""

import json
import re

import numpy as np
import pytest

from horovod_volo.report.chart import Chart, Curve, draw, linear_axis, log_axis
from horovod_volo.report.quantities import Quantity
from tests.unit.parsed_page import ParsedPage


def chart_of(*curves: Curve, is_log: bool = False) -> ParsedPage:
    return ParsedPage(draw(Chart("Title", Quantity("Title", unit="units"), "epochs", curves, is_log)))


def grid_of(page: ParsedPage, number: int) -> tuple[float, ...]:
    """Return left, top, right and bottom of the axes of a drawing."""
    (_, found) = [each for each in page.elements if "data-box" in each[1]][number]
    return tuple(map(float, found["data-box"].split()))


@pytest.mark.parametrize("is_log", [False, True])
def test_points_are_where_the_axes_say(is_log: bool) -> None:
    random = np.random.default_rng(0)
    points = list(zip(range(1, 9), (10 ** random.uniform(-2, 1, size=8)).tolist(), strict=True))
    page = chart_of(Curve("run", points), is_log=is_log)
    values = [y for _, y in points]
    axis = log_axis(values, 5) if is_log else linear_axis(values, 5)
    paths = [found["d"] for tag, found in page.elements if tag == "path"]
    assert len(paths) == 2
    for number, path in enumerate(paths):
        left, top, right, bottom = grid_of(page, number)
        expected = [
            (left + (right - left) * x / 8, bottom - (bottom - top) * axis.place(y)) for x, y in points
        ]
        places = re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)
        assert np.array(places, float) == pytest.approx(np.array(expected), abs=0.11)
    (figure,) = [found for tag, found in page.elements if tag == "figure"]
    (said,) = json.loads(figure["data-points"])["curves"]
    assert said["y"] == [f"{y:#.4g} units" for y in values]
