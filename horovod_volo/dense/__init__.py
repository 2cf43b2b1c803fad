"""Segmentation and detection: samples, networks, losses, metrics, evaluation. The core finds them by name."""
