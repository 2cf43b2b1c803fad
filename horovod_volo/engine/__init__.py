"""The work: what a step, an epoch, an evaluation and a checkpoint are. Knows all other rooms."""
