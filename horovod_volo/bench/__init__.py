"""Measurements of speed, memory and learning; every published number comes from here.

`machine` holds what a user runs on one machine or on the ranks of a job, `scaling_study` what is measured and
computed about many ranks. Neither imports the other. A benchmark is a function that returns a Result, by
default `measure` in a module of the benchmark's name; its parameters, annotated with their help (`cli.py`),
are its flags. Invariant: a speed is reported only after ours and the peer's results were compared.
"""
