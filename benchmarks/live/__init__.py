"""Measures the cost of an open rollout while its agent waits for a model."""
