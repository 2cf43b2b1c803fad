"""Images into tar shards."""
