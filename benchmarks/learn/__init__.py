"""A tiny model learns to repair repositories through the whole stack: `make learn`."""
