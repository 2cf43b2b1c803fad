"""Horovod data-parallel trainer for VOLO vision transformers."""
