"""The training objective: MixToken, Mixup and CutMix, soft targets from label maps, and the losses.

Invariant: the logits and their gradient are the only tensors of tokens x classes; nothing waits for the device.
"""
