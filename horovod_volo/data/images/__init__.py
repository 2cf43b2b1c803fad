"""The catalog of images in class folders, tar, TFRecord or RecordIO shards."""
