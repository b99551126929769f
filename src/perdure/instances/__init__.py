"""Turns rows of datasets into instances, builds datasets, and prepares environments."""
