"""Measures gradings per minute by number of cores, and the cost of twins."""
