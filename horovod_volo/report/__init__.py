"""A page about one or several runs: one HTML file with charts, tables and pictures that requests no other."""
