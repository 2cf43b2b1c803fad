"""The ground, beside config: how anything is put on disk so that it is whole or absent."""
