"""Settings: their schema, the command line and recipes that set them, and the numbers derived from them.

Invariant: it imports the standard library and `core` only, so that `--help` answers at once.
"""
