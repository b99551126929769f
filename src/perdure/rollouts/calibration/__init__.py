"""Proves rows: runs rollouts of the gold patch and of the base, and evaluates their grades."""
