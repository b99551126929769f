"""Measures what a rollout and a crash cost, compared with other harnesses."""
