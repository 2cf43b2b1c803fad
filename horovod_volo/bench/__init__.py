"""Measurements of speed and memory; every published number comes from here.

A benchmark is a function that returns a Result, by default `measure` in a module of the benchmark's name; its
parameters, annotated with their help (`Flag`), are its flags. `peers*.py` have what ours is compared with.
Invariant: a speed is reported only after ours and the peer's results were compared.
"""
