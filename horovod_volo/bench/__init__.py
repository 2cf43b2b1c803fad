"""Measurements: every published number comes from here, as pairs of blocks that take turns.

A speed is told only beside the proof that what was measured gives the right values.
"""
