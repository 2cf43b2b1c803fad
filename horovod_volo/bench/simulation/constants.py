"""Every number the simulator takes as given, with where it is from: the only place for them.

`measured`: by somebody who tells how. `published`: claimed. `assumed`: nobody has measured it here;
a prediction is as good as these are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

_NCCL = "NCCL, src/graph/tuning.cc: base and hardware latencies, Simple protocol"
_ROOFLINE = "estimate from FLOPs and bytes at 0.60 to 0.68 of their limit; not run"


class Constant(NamedTuple):
    """One number."""

    name: str
    value: float
    unit: str
    kind: Literal["measured", "published", "assumed"]
    source: str


CONSTANTS = (
    # Links.
    Constant("nccl start", 8.4e-6, "s", "published", _NCCL),
    Constant(
        "nccl ring hop inside",
        6e-6,
        "s",
        "published",
        f"{_NCCL}; 3 x 2 us network overhead, above NVLink's 3.4",
    ),
    Constant("nccl ring hop between", 14e-6, "s", "published", _NCCL),
    Constant("nccl tree hop inside", 4e-6, "s", "published", _NCCL),
    Constant("nccl tree hop between", 14e-6, "s", "published", _NCCL),
    Constant("a100 inside", 232.5e9, "byte/s", "measured", "bus rate of one DGX A100, nccl issue 1048"),
    Constant(
        "a100 between",
        192e9,
        "byte/s",
        "measured",
        "DGX A100 with 8 x HDR200, NVIDIA in nccl issues 812, 1576",
    ),
    Constant(
        "h200 inside", 480e9, "byte/s", "measured", "H100 with NVLS, nccl-tests issue 212; H200 has the same"
    ),
    Constant("h200 between", 330e9, "byte/s", "measured", "8 x 400G, nccl issue 1221 (320 to 330)"),
    Constant("ethernet inside", 12e9, "byte/s", "assumed", "PCIe 4 without NVLink"),
    Constant("ethernet between", 3.1e9, "byte/s", "assumed", "one 25 GbE port at line rate for 4 GPUs"),
    Constant("ethernet hop", 50e-6, "s", "assumed", "TCP through the kernel of two hosts and a switch"),
    # Horovod.
    Constant("horovod cycle", 1e-3, "s", "published", "default of HOROVOD_CYCLE_TIME, Horovod 0.28.1"),
    Constant(
        "horovod fusion",
        128 * 2**20,
        "byte",
        "published",
        "default of HOROVOD_FUSION_THRESHOLD, Horovod 0.28.1",
    ),
    Constant("our fusion", 0, "byte", "published", "this code, cluster/env_vars.py: buckets go as they are"),
    Constant(
        "negotiation per level",
        100e-6,
        "s",
        "assumed",
        "agreement of all ranks in a cycle, times log2 of ranks",
    ),
    Constant("hook", 40e-6, "s", "assumed", "Python of a hook and its call; stock: one a tensor"),
    Constant(
        "stock passes", 20, "byte/parameter", "published", "Horovod's code: cast, copy in, copy out, cast"
    ),
    Constant("our passes", 12, "byte/parameter", "published", "this code: a pass to fp16, a pass back"),
    # One GPU.
    Constant("backward share", 2 / 3, "of a step", "assumed", "two of three multiplications"),
    Constant(
        "sigma", 0.005, "of a step", "assumed", "spread of a rank's step: loader, clock, kernel launches"
    ),
    Constant("a100 volo_d1 step", 48.9e-3, "s", "assumed", f"128 images; {_ROOFLINE}"),
    Constant("a100 volo_d5 step", 366e-3, "s", "assumed", f"128 images; {_ROOFLINE}"),
    Constant("h200 volo_d1 step", 36.1e-3, "s", "assumed", f"256 images; {_ROOFLINE}"),
    Constant("h200 volo_d5 step", 128e-3, "s", "assumed", f"128 images; {_ROOFLINE}"),
    Constant("a100 copy rate", 1.6e12, "byte/s", "assumed", "0.8 of the data sheet's 2.0 TB/s"),
    Constant("h200 copy rate", 4.3e12, "byte/s", "assumed", "0.9 of the data sheet's 4.8 TB/s"),
    # What others report, and what is needed to repeat it.
    Constant(
        "seed efficiency", 0.84, "at 40 of 8", "published", "NVIDIA's VOLO article: 2,100 of 5 x 500 images/s"
    ),
    Constant(
        "seed step", 128 / 62.5, "s", "published", "the same: 62.5 images/s and GPU; 128 images assumed"
    ),
    Constant("seed gradients", 1181.8e6, "byte", "published", "VOLO-D5 in fp32"),
    Constant("one card", 24e9, "byte/s", "assumed", "an eighth of the rate of 8 x HDR200"),
    Constant("ddl efficiency", 0.95, "at 256 of 1", "published", "IBM PowerAI DDL, ResNet-50, 256 P100"),
    Constant("ddl step", 0.17, "s", "assumed", "ResNet-50 in Caffe on a P100, 32 images"),
    Constant("ddl gradients", 102e6, "byte", "published", "ResNet-50 in fp32"),
    Constant("ddl inside", 30e9, "byte/s", "assumed", "two NVLinks between P100s of a Minsky"),
    Constant("ddl between", 20e9, "byte/s", "assumed", "0.8 of two EDR cards"),
    Constant(
        "nemo efficiency", 0.96, "at 128 of 8", "published", "NVIDIA NeMo ViT-g/14, 693 to 10,644 images/s"
    ),
    Constant("nemo step", 32 / 86.6, "s", "assumed", "86.6 images/s and GPU published; 32 images assumed"),
    Constant("nemo gradients", 2.02e9, "byte", "assumed", "1.01 G parameters in bf16"),
)

_BY_NAME = {entry.name: entry for entry in CONSTANTS}


def constant(name: str) -> float:
    """Return a number of the table."""
    return _BY_NAME[name].value
