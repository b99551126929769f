"""What a rollout asks of a Temporal server."""
