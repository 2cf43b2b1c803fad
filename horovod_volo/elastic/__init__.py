"""Runs whose ranks come and go: horovodrun adds and removes hosts, and training goes on from memory."""
