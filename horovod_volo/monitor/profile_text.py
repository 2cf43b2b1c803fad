"""What a profile of steps says in words: where the time went, and what to change first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod_volo.monitor.step_ranges import EXCHANGE, OWN_PART, STEP, UPDATE, Range

_MOST_SHOWN = 5


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds of a step of one rank, and of its parts."""

    step: float
    own_part: float  # forward and backward, without waiting for data
    data: float
    exchange: float  # that was not hidden behind backward
    update: float

    @property
    def other(self) -> float:
        """Return the seconds of a step between the end of its update and the next one."""
        return max(0.0, self.step - self.own_part - self.data - self.exchange - self.update)


def times_of(ranges: Sequence[Range], waited_seconds: float) -> RankTimes:
    """Return the times of a rank, given how long it waited for data in all of its steps."""
    sums = dict.fromkeys((STEP, OWN_PART, EXCHANGE, UPDATE), 0.0)
    for each in ranges:
        if each.name in sums:
            sums[each.name] += each.duration / 1e6
    steps = sum(each.name == STEP for each in ranges)
    data = waited_seconds / steps
    means = {name: seconds / steps for name, seconds in sums.items()}
    own = max(0.0, means[OWN_PART] - data)
    return RankTimes(means[STEP], own, data, means[EXCHANGE], means[UPDATE])


def describe(
    steps: range,
    times: Sequence[RankTimes],
    hosts: Sequence[str],
    operators: Mapping[str, float],
    *,
    on_gpu: bool,
) -> str:
    """Return the paragraph, given the times of all ranks and the seconds of operators on rank 0."""
    first = times[0]
    shares = {
        "forward and backward": first.own_part,
        "waiting for data": first.data,
        "the exchange that was not hidden": first.exchange,
        "the update": first.update,
        "the rest, such as logs and checkpoints": first.other,
    }
    parts = [f"{100 * seconds / first.step:.0f} % {name}" for name, seconds in shares.items()]
    text = f"A step took {1e3 * first.step:.1f} ms on rank 0 (steps {steps[0]} to {steps[-1]}): "
    text += f"{', '.join(parts)}."
    if len(times) > 1:
        own = [each.own_part + each.data for each in times]
        slowest = own.index(max(own))
        text += (
            f" The slowest rank is {slowest} on {hosts[slowest]}: {1e3 * own[slowest]:.1f} ms for its own "
            f"part, the fastest takes {1e3 * min(own):.1f} ms."
        )
    total = sum(operators.values())
    most = sorted(operators, key=lambda name: -operators[name])[:_MOST_SHOWN]
    if total:
        shown = ", ".join(f"{name} {100 * operators[name] / total:.0f} %" for name in most)
        text += f" Of the {'GPU' if on_gpu else 'CPU'} time of operators: {shown}."
    return f"{text} To change first: {_advice(times, on_gpu=on_gpu)}"


def _advice(times: Sequence[RankTimes], *, on_gpu: bool) -> str:
    """Return what to change first: the part that exceeds most what it may take, else the arithmetic."""
    first = times[0]
    own_parts = sorted(each.own_part + each.data for each in times)
    excess = {
        "data": first.data / first.step / 0.1,
        "straggler": (own_parts[-1] / own_parts[len(own_parts) // 2] - 1) / 0.2,
        "exchange": first.exchange / first.step / 0.15,
        "update": first.update / first.step / 0.15,
        "arithmetic on a GPU" if on_gpu else "arithmetic": 1.0,
    }
    if excess["straggler"] > 1:
        excess["exchange"] = 0.0  # it contains the wait for the slowest rank
    return _ADVICE[max(excess, key=lambda name: excess[name])]


_ADVICE = {
    "data": "reading. Give each rank more cores or --workers, pack the images into shards and shrink them "
    "(horovod-volo pack --resize), or use lighter augmentation (--aa).",
    "straggler": "the slowest rank. All others wait for it: look at its host with horovod-volo doctor.",
    "exchange": "the exchange. A larger --batch-size or --accumulation sends the same gradients less often; "
    "--compression fp16 halves them; horovod-volo doctor measures the network.",
    "update": "the update. A larger --batch-size makes it rarer; --shard-optimizer divides it by the ranks.",
    "arithmetic": "arithmetic: this is a CPU. A smaller --img-size or --model is faster, and so is a GPU.",
    "arithmetic on a GPU": "arithmetic. Try --precision bf16 and --compile, then a larger --batch-size.",
}
