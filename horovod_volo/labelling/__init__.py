"""Label maps made by a teacher network, and their geometry found with one."""
