"""Every number that the simulator takes as given, with its source: the only place for them.

`measured`: by somebody who describes how. `published`: claimed. `assumed`: not measured by anyone known here;
a prediction is only as good as these.
"""

from __future__ import annotations

_NCCL = "NCCL, src/graph/tuning.cc: base and hardware latencies, Simple protocol"
_HOROVOD = "default of Horovod 0.28.1"
_ROOFLINE = "images; estimate from FLOPs and bytes at 0.60 to 0.68 of their limit; not run"
_NVIDIA = "NVIDIA's VOLO article: 2,100 of 5 x 500 images/s"


# Name, value, unit, kind, source.
CONSTANTS = (
    # Links.
    ("nccl start", 8.4e-6, "s", "published", _NCCL),
    ("nccl ring hop inside", 6e-6, "s", "published", f"{_NCCL}; 3 x 2 us overhead, above NVLink's 3.4"),
    ("nccl ring hop between", 14e-6, "s", "published", _NCCL),
    ("nccl tree hop inside", 4e-6, "s", "published", _NCCL),
    ("nccl tree hop between", 14e-6, "s", "published", _NCCL),
    ("a100 inside", 232.5e9, "byte/s", "measured", "bus rate of one DGX A100, nccl issue 1048"),
    ("a100 between", 192e9, "byte/s", "measured", "DGX A100, 8 x HDR200; NVIDIA in nccl issues 812, 1576"),
    ("h200 inside", 480e9, "byte/s", "measured", "H100 with NVLS, nccl-tests issue 212; H200 has the same"),
    ("h200 between", 330e9, "byte/s", "measured", "8 x 400G, nccl issue 1221 (320 to 330)"),
    # Horovod.
    ("horovod cycle", 1e-3, "s", "published", f"HOROVOD_CYCLE_TIME, {_HOROVOD}"),
    ("horovod fusion", 128 * 2**20, "byte", "published", f"HOROVOD_FUSION_THRESHOLD, {_HOROVOD}"),
    ("our fusion", 0, "byte", "published", "this code, cluster/pinning.py: buckets are not fused"),
    ("negotiation per level", 100e-6, "s", "assumed", "negotiation of all ranks, times log2 of the ranks"),
    ("hook", 40e-6, "s", "assumed", "Python of a gradient hook and its call; stock: one per tensor"),
    ("stock passes", 20, "byte/parameter", "published", "Horovod's code: cast, copy in, copy out, cast"),
    ("ours passes", 12, "byte/parameter", "published", "this code: one pass to fp16, one back"),
    # One GPU.
    ("backward fraction", 2 / 3, "of a step", "assumed", "two of three multiplications"),
    ("sigma", 0.005, "of a step", "assumed", "deviation of a rank's step: loader, clock, kernel launches"),
    ("a100 volo_d1 step", 48.9e-3, "s", "assumed", f"128 {_ROOFLINE}"),
    ("a100 volo_d5 step", 366e-3, "s", "assumed", f"128 {_ROOFLINE}"),
    ("h200 volo_d1 step", 36.1e-3, "s", "assumed", f"256 {_ROOFLINE}"),
    ("h200 volo_d5 step", 128e-3, "s", "assumed", f"128 {_ROOFLINE}"),
    ("a100 copy rate", 1.6e12, "byte/s", "assumed", "0.8 of the data sheet's 2.0 TB/s"),
    ("h200 copy rate", 4.3e12, "byte/s", "assumed", "0.9 of the data sheet's 4.8 TB/s"),
    # Efficiencies that others report, and what is needed to compute them.
    ("seed efficiency", 0.84, "at 40 of 8", "published", _NVIDIA),
    ("seed step", 128 / 62.5, "s", "published", f"{_NVIDIA}, 62.5 images/s and GPU; 128 images assumed"),
    ("seed gradients", 1181.8e6, "byte", "published", "VOLO-D5 in fp32"),
    ("one card", 24e9, "byte/s", "assumed", "an eighth of the rate of 8 x HDR200"),
    ("ddl efficiency", 0.95, "at 256 of 1", "published", "IBM PowerAI DDL, ResNet-50, 256 P100"),
    ("ddl step", 0.17, "s", "assumed", "ResNet-50 in Caffe on a P100, 32 images"),
    ("ddl gradients", 102e6, "byte", "published", "ResNet-50 in fp32"),
    ("ddl hop", 50e-6, "s", "assumed", "TCP through the kernel of two hosts and a switch"),
    ("ddl inside", 30e9, "byte/s", "assumed", "two NVLinks between P100s of a Minsky"),
    ("ddl between", 20e9, "byte/s", "assumed", "0.8 of two EDR cards"),
    ("nemo efficiency", 0.96, "at 128 of 8", "published", "NVIDIA NeMo ViT-g/14, 693 to 10,644 images/s"),
    ("nemo step", 32 / 86.6, "s", "assumed", "86.6 images/s and GPU published; 32 images assumed"),
    ("nemo gradients", 2.02e9, "byte", "assumed", "1.01 G parameters in bf16"),
)
_VALUES = {name: float(value) for name, value, *_ in CONSTANTS}


def constant(name: str) -> float:
    """Return the value of a constant."""
    return _VALUES[name]
