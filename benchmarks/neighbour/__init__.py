"""What a hostile rollout costs the rollout beside it."""
