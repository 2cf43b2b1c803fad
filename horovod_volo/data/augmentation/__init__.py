"""What is drawn for a training image, and how it is carried out: cut, moved, recoloured, erased."""
