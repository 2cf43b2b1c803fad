"""Triton kernels for NVIDIA GPUs, as operators; `*_kernels` modules import Triton, when one is launched."""

KERNEL_DEVICES = ("cuda", "meta")  # on meta, memory and time of a GPU's step are counted
