"""Images with a mask each, which gives the class of every pixel."""
