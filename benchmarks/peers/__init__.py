"""Runs each peer in its own environment by its own command line."""
