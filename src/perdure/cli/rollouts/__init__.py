"""One rollout, as people read it."""
