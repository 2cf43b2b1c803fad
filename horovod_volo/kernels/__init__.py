"""Kernels for NVIDIA GPUs, written in Triton: the only place that imports it, and only where one is used."""
