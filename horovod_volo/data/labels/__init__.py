"""Token-label maps: read, made, packed, checked and shown."""
