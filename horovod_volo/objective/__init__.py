"""The training objective: MixToken, Mixup and CutMix, soft targets from label maps, and the losses.

Invariant: of the cross-entropy, only the logits and their gradient have tokens x classes values. Nothing
waits for the device.
"""
