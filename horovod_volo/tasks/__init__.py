"""What is learned: images, network, loss and evaluation of each task. The engine trains all of them."""
