"""Accuracy of trained networks: top-1, ImageNet-ReaL, ImageNet-V2, per class."""
