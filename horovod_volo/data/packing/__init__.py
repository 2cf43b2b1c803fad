"""Pack images into tar shards, with a manifest to verify them."""
