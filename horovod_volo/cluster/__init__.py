"""Ranks and what connects them: launch environment, CPU binding, collectives and the gradient reduction.

The only package that imports horovod.
"""
