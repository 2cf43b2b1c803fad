"""A data set of drawn shapes, with token labels, to try everything on."""
