"""Measured promises: what a rollout costs, and what a crash costs, beside the peers."""
