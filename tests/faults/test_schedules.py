"""Small runs meet drawn schedules of faults, and the judge finds the history of each legal.

Behind `./tools/test --soak` there are SOAK_SCHEDULES of them, and some runs of Horovod's own elastic ranks.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.faults.elastic_run import on_this_machine
from tests.faults.judge import RunPlan, judge, read_history
from tests.faults.schedules import draw, run, undisturbed

SCHEDULES = int(os.environ.get("SOAK_SCHEDULES", "1000"))
AT_ONCE = 5  # they wait more than they compute
HOROVOD_RUNS, HOSTS = 10, "localhost:1,127.0.0.1:1"


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


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(HOROVOD_RUNS))
def test_elastic_ranks_of_horovod_leave_a_legal_history(
    demo_images: Callable[[int, int], Path], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    flags = ("--global-batch", "10", "--epochs", "50", "--eval-every", "5", "--checkpoint-every", "5")
    flags += ("--plugin", "tests.faults.counting_rank")
    with on_this_machine(tmp_path, demo_images(60, 10), HOSTS, *flags, HISTORY=str(tmp_path)) as trial:
        for formations in (1, 3, 5):
            trial.train_on(2, formations=formations)
            host = chance.choice(["localhost", "127.0.0.1"])
            if (kind := chance.choice(["kill", "stop", "leave"])) == "leave":
                trial.change_hosts(f"{host}:1")
                trial.train_on(1, formations=formations + 1)
                trial.change_hosts(HOSTS)
            else:
                trial.signal_rank(host, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        assert trial.process.wait(240) == 0, trial.output
    plan = RunPlan(seed=42, images=60, global_batch=10, steps=300)
    assert judge(read_history(tmp_path, plan)) == []
