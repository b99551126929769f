"""The peers, each run in its own environment by its own command line."""
