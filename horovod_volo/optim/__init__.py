"""Optimizers, parameter groups, the learning rate schedule, gradient clipping and EMA."""
