"""What is minimised: MixToken, dense label maps as soft targets, and the token-label loss.

Pure torch, without I/O. Nothing here may make a tensor of classes x tokens besides the logits
themselves, nor wait for the device.
"""
