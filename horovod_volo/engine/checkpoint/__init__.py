"""Checkpoints: their format on disk (`files`), when and what to save (`saving`), how to resume (`resuming`)."""
