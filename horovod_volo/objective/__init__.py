"""The training objective: MixToken, Mixup and CutMix, soft targets from label maps, and the losses.

Invariant: only the logits and their gradient have tokens x classes values; nothing waits for the device.
"""
