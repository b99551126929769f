"""Measured promises: what a rollout and a crash cost, compared with the peers."""
