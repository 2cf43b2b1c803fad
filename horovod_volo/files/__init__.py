"""The ground, beside config: files that are whole or absent, and files in which the system tells facts."""
