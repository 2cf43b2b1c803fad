"""Token labels: how they are stored, found, and laid over their images."""
