"""What `--profile` records of some steps: traces of all ranks, and in words where the time went."""
