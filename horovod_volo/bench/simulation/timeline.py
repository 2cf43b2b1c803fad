"""When the last gradient has arrived: messages become ready during backward and leave through one channel.

Horovod's thread wakes once a cycle, agrees with all ranks on what is ready, fuses it, and sends it in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """Some gradients, and when the last of them is there."""

    ready: float
    size: float  # bytes


@dataclass(frozen=True)
class Channel:
    """How messages come to leave."""

    period: float  # seconds from cycle to cycle
    agreement: float  # seconds for all ranks to agree on what is ready
    fusion_bytes: float  # what travels as one message at most; a larger one goes alone
    waits: bool  # the thread that agrees also carries, as on CPUs: no cycle begins meanwhile
    hidden: float = 0.0  # seconds less that a message takes where it follows another at once


def end_of_exchange(
    messages: Sequence[Message],
    channel: Channel,
    seconds: Callable[[float], float],
    phase: float = 0.0,
) -> float:
    """Return when all have arrived; `seconds` tells how long a message of a size is on its way.

    Messages are in the order of their ready times. Cycles begin at `phase` and every period after it.
    """
    period = max(channel.period, channel.agreement)
    now, free, number = phase, 0.0, 0
    while number < len(messages):
        now = _next_cycle(now, messages[number].ready, period)
        ready = []
        while number < len(messages) and messages[number].ready <= now:
            ready.append(messages[number].size)
            number += 1
        agreed = now + channel.agreement
        for size in _fused(ready, channel.fusion_bytes):
            follows = 0.0 < free >= agreed
            free = max(agreed, free) + seconds(size) - (channel.hidden if follows else 0.0)
        now = max(now + period, free if channel.waits else agreed)
    return free


def _next_cycle(now: float, ready: float, period: float) -> float:
    """Return the beginning of the first cycle, from `now` on, that finds the message."""
    if ready <= now:
        return now
    found = now + math.ceil((ready - now) / period) * period if period else ready
    return max(found, ready)  # rounding must not put it just before the message


def _fused(sizes: Sequence[float], limit: float) -> Iterator[float]:
    total = 0.0
    for size in sizes:
        if total and total + size > limit:
            yield total
            total = 0.0
        total += size
    if total:
        yield total
