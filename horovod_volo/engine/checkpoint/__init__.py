"""Checkpoints of the training state, and how a run resumes from one.

`engine/loop.py` calls `saving`, `engine/run.py` calls `resuming`. `files` is the format on disk; `metadata`
holds the settings that a resumed run must share. `engine/state.py` says which tensors are in which file.
"""
