"""Measures the load of a rollout on a Temporal server."""
