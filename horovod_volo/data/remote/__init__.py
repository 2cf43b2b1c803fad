"""Shards on a server: ranges of bytes over HTTP or from S3, and blocks of them on a local disk."""
