"""The augmentation of training images: crops, flips, RandAugment and random erasing."""
