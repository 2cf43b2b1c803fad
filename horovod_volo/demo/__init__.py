"""Drawn data sets, with labels, masks and boxes that are true: for the demo, tests and benchmarks."""
