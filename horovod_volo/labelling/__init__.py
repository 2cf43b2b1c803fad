"""Teacher networks at work: generate label maps, and verify the geometry of existing ones."""
