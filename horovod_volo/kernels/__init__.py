"""Triton kernels for NVIDIA GPUs, as torch operators. Launching one imports Triton (`*_kernels` modules)."""
