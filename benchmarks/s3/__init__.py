"""What a rollout asks of S3."""
