"""Errors, atomic files and error messages: what every other package may import."""
