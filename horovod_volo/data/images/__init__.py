"""Which images there are and where their bytes lie, whatever their format."""
