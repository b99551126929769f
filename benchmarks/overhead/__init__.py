"""What a rollout costs: rollouts per minute and CPU seconds each, compared with the peers."""
