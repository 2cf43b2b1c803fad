"""The networks: built by name, with the training forward, and their weights in and out.

The only room that imports timm.
"""
