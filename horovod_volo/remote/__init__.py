"""Images of shards on a server, read over HTTP or S3."""
