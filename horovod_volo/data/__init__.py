"""Images in: which there are, in which order, cut how, decoded into batches.

The only room that imports nvidia.dali.
"""
