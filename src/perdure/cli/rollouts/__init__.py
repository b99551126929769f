"""Shows one rollout on the terminal."""
