"""The command that checks an installation, its hosts and the network between them."""
