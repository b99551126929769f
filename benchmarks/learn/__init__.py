"""Trains a tiny model to repair repositories through the whole stack: `make learn`."""
