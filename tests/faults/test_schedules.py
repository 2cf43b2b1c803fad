"""Small runs that meet drawn schedules of faults: the history of each is legal.

Behind `./tools/test --soak` there are a thousand.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.faults.judge import judge
from tests.faults.schedules import draw, run, undisturbed

SCHEDULES = int(os.environ.get("SOAK_SCHEDULES", "1000"))
AT_ONCE = 4  # they wait more than they compute


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return undisturbed(tmp_path_factory.mktemp("small") / "undisturbed")


def findings(folder: Path, states: list[str], seed: int) -> list[str]:
    """Return what was illegal in the history of a schedule."""
    try:
        found = judge(run(folder / str(seed), draw(seed), states))
    except AssertionError as error:
        found = [str(error)]
    return [f"schedule {seed}, {draw(seed)}: {each}" for each in found]


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, SCHEDULES), marks=pytest.mark.soak)], ids=len
)
def test_every_history_is_legal(states: list[str], tmp_path: Path, seeds: range) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [each for every in pool.map(partial(findings, tmp_path, states), seeds) for each in every]
    assert found == [], "\n".join(found)
