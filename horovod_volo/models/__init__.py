"""Models: built by name, with their training forward, and the import and export of weights.

The only package that imports timm.
"""
