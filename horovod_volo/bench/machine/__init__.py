"""Benchmarks of the training step, its parts, its data and what it learns, on the machine they are run on."""
