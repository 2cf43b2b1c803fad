"""Random numbers as a function of where they are needed: no state, the same on every machine.

Needed in every pass: a hash of the place takes a microsecond or two, to seed a generator takes tens.
"""

from __future__ import annotations

from hashlib import blake2b

_BYTES = 8  # of a number


def bits(*place: int) -> int:
    """Return 64 random bits that belong to the place; its first number should name what they are for."""
    return int.from_bytes(_hash(place, 1), "little")


def uniform(count: int, *place: int) -> list[float]:
    """Return so many numbers from 0 up to 1, 1 excluded."""
    drawn = _hash(place, count)
    numbers = (
        int.from_bytes(drawn[first : first + _BYTES], "little") for first in range(0, len(drawn), _BYTES)
    )
    return [(number >> 11) * 2.0**-53 for number in numbers]  # a double holds no more than 53 bits


def _hash(place: tuple[int, ...], count: int) -> bytes:
    return blake2b(" ".join(map(str, place)).encode(), digest_size=count * _BYTES).digest()
