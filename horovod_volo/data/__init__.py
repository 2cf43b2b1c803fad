"""Input: the catalog of images, their order, augmentation, decoding and label maps.

The only package that imports nvidia.dali.
"""
