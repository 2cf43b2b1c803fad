"""A synthetic data set of drawn shapes with token labels, for tests and first runs."""
