"""Updates: which parameters decay, the optimizer, the learning rate of a step, averaged weights."""
