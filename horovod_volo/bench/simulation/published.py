"""What others published, between two bounds: nothing of the exchange hidden, and all but its last piece.

None of them tells all that a prediction needs; what is assumed stands in the table of constants.
"""

from __future__ import annotations

from typing import NamedTuple

from horovod_volo.bench.simulation.collectives import all_reduce_seconds, parameter_server_seconds
from horovod_volo.bench.simulation.constants import constant
from horovod_volo.bench.simulation.fabrics import FABRICS, with_rates
from horovod_volo.bench.simulation.stragglers import expected_largest


class Bounds(NamedTuple):
    """A published efficiency, and what the model gives."""

    name: str
    published: float
    low: float
    high: float
    why: str  # the bounds are not closer


def published_points() -> list[Bounds]:
    """Return each published point with its bounds."""
    return [_seed(), _ddl(), _nemo()]


def _seed() -> Bounds:
    step, size = constant("seed step"), constant("seed gradients")
    many = FABRICS["a100-hdr"]
    one = with_rates(many, "one card", inside=many.inside, between=constant("one card"))
    low, high = (
        _compared(step, parameter_server_seconds(size, 8, links), parameter_server_seconds(size, 40, links))
        for links in (one, many)
    )
    return Bounds(
        "VOLO-D5 on 40 of 8 A100, parameter server",
        constant("seed efficiency"),
        low,
        high,
        "through one network card, or eight: the article does not tell, nor where the server ran",
    )


def _ddl() -> Bounds:
    links = with_rates(
        FABRICS["a100-25gbe"], "Minsky", inside=constant("ddl inside"), between=constant("ddl between")
    )
    exchange = all_reduce_seconds(constant("ddl gradients"), 256, links)
    low, high = _bounds(constant("ddl step"), 256, 1, 0.0, exchange)
    return Bounds(
        "ResNet-50 on 256 P100, IBM DDL",
        constant("ddl efficiency"),
        low,
        high,
        "how much of the exchange Caffe hid is not told, nor the time of one GPU's step",
    )


def _nemo() -> Bounds:
    links, size = FABRICS["a100-hdr"], constant("nemo gradients")
    base, exchange = (all_reduce_seconds(size, ranks, links) for ranks in (8, 128))
    low, high = _bounds(constant("nemo step"), 128, 8, base, exchange)
    return Bounds(
        "ViT-g/14 on 128 of 8 A100, NeMo",
        constant("nemo efficiency"),
        low,
        high,
        "it lost more than exchange and spread explain: neither its batch nor its loader is told",
    )


def _bounds(step: float, ranks: int, base_ranks: int, base: float, exchange: float) -> tuple[float, float]:
    sigma = constant("sigma") * step
    base_wait, wait = sigma * expected_largest(base_ranks), sigma * expected_largest(ranks)
    exposed = _compared(step, base + base_wait, exchange + wait)
    return exposed, _compared(step, base_wait, wait)


def _compared(step: float, base: float, now: float) -> float:
    return (step + base) / (step + now)
