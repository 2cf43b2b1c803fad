"""Training: set-up, the loop, the step, its state, checkpoints, and evaluation during training."""
