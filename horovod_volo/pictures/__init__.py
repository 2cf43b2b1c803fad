"""Pictures of a run of classification: an extra."""
