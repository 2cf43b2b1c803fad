"""Triton kernels for NVIDIA GPUs. No other package imports Triton; import this only where a kernel runs."""
