"""The training objective: MixToken, Mixup and CutMix, soft targets from label maps, and the losses.

Pure torch, without I/O. Invariants: the logits and their gradient are the only tensors of tokens x classes,
and nothing synchronizes with the device.
"""
