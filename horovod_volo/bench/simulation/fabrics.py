"""The fabrics and GPUs that are predicted, made of the table's constants."""

from __future__ import annotations

from dataclasses import dataclass, replace

from horovod_volo.bench.simulation.collectives import Fabric
from horovod_volo.bench.simulation.constants import constant


def _nccl(name: str, gpu: str) -> Fabric:
    return Fabric(
        name=name,
        ranks_per_host=8,
        start=constant("nccl start"),
        ring_hop_inside=constant("nccl ring hop inside"),
        ring_hop_between=constant("nccl ring hop between"),
        tree_hop_inside=constant("nccl tree hop inside"),
        tree_hop_between=constant("nccl tree hop between"),
        inside=constant(f"{gpu} inside"),
        between=constant(f"{gpu} between"),
    )


FABRICS = {
    "a100-hdr": _nccl("DGX A100, 8 x HDR200", "a100"),
    "h200-ndr": _nccl("8 x H200, 8 x NDR400", "h200"),
    "a100-25gbe": Fabric(
        name="4 x A100, 25 GbE",
        ranks_per_host=4,
        start=constant("nccl start"),
        ring_hop_inside=constant("nccl ring hop inside"),
        ring_hop_between=constant("ethernet hop"),
        tree_hop_inside=constant("nccl tree hop inside"),
        tree_hop_between=constant("ethernet hop"),
        inside=constant("ethernet inside"),
        between=constant("ethernet between"),
    ),
}


MODELS = ("volo_d1", "volo_d5")  # whose steps are estimated


@dataclass(frozen=True)
class Gpu:
    """One GPU's step and memory; both assumed."""

    step_seconds: dict[str, float]
    copy_rate: float


def gpu_of(fabric: str) -> Gpu:
    """Return the GPU that a fabric's name begins with."""
    name = fabric.partition("-")[0]
    steps = {model: constant(f"{name} {model} step") for model in MODELS}
    return Gpu(steps, constant(f"{name} copy rate"))


def with_rates(fabric: Fabric, name: str, *, inside: float, between: float) -> Fabric:
    """Return a fabric of the same hosts and hops with other rates."""
    return replace(fabric, name=name, inside=inside, between=between)
