"""Chaos that nobody can tune to: a seed draws acts from the full menu, an oracle judges each rollout."""
