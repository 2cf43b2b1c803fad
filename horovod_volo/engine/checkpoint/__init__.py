"""Checkpoints of the training state: `files` is their format on disk and how one is written, the loop calls
`saving`, and the set-up calls `resuming`. `engine/state.py` says which tensors are in which file.
"""
