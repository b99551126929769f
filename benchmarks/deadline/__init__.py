"""Deadlines of runs whose processes are killed."""
