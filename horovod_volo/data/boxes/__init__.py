"""Images with boxes around their objects, and a class of each box."""
