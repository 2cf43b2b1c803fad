"""The ground: what can be set, where it comes from, and what follows from it by arithmetic.

Imports nothing of the other rooms and no heavy library: `--help` must answer at once.
"""
