"""How training grows: measured on emulated hosts, and computed for many GPUs."""
