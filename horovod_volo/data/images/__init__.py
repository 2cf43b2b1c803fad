"""The catalog of images in class folders or tar shards, and lists of images in memory."""
