"""The other ranks: how this process was started, what it may say to the others, and how gradients meet.

The only room that imports horovod.
"""
