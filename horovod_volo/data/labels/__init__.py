"""Token-label maps: published files, packed stores, their geometry, checks and figures."""
