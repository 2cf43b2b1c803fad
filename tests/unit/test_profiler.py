"""Profiles of steps: which are profiled, and the words."""

from __future__ import annotations

from collections import Counter

import pytest

from horovod_volo.core.errors import UserError
from horovod_volo.engine.callbacks import parse_steps
from horovod_volo.monitor.meters import EXCHANGE, OWN_PART, UPDATE
from horovod_volo.profiler.step_profiler import DATA, describe


def test_the_steps_are_read() -> None:
    assert parse_steps("steps=10:20") == parse_steps("10:20") == range(10, 21)
    for wrong in ("steps=", "10", "0:3", "5:4", "a:b", "steps=3:", "1:2:3"):
        with pytest.raises(UserError, match="--profile"):
            parse_steps(wrong)


def times_of(*seconds: float) -> dict[str, float]:
    return dict(zip((OWN_PART, DATA, EXCHANGE, UPDATE), seconds, strict=True))


@pytest.mark.parametrize(
    ("times", "device", "first"),
    [
        ([times_of(0.6, 0.3, 0.05, 0.05)], "CPU", "--workers"),
        ([times_of(0.5, 0.05, 0.4, 0.05)] * 2, "CPU", "--compression"),
        (
            [times_of(0.5, 0.0, 0.4, 0.1)] * 3 + [times_of(0.9, 0.0, 0.0, 0.1)],
            "GPU",
            "slowest rank",
        ),
        ([times_of(0.6, 0.0, 0.0, 0.4)], "CPU", "--shard-optimizer"),
        ([times_of(0.9, 0.0, 0.05, 0.05)], "GPU", "--precision bf16"),
        ([times_of(0.9, 0.0, 0.05, 0.05)], "CPU", "this is a CPU"),
    ],
)
def test_the_words_name_what_to_change_first(times: list[dict[str, float]], device: str, first: str) -> None:
    text = describe(range(3, 6), times, ["a", "b", "c", "d"], Counter(mm=3, add=1), device)
    assert all(part in text for part in ("1000.0 ms", "steps 3 to 5", "mm 75 %, add 25 %"))
    assert first in text.partition("To change first: ")[2]
    assert ("3 on d: 900.0 ms" in text) == (len(times) == 4)
