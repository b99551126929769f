"""Deterministic ordering of the activities, and nothing else."""
