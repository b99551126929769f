"""What an open rollout costs while its agent waits for a model."""
