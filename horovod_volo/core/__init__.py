"""What every other package may import: batches, errors, files, random numbers, versions."""
