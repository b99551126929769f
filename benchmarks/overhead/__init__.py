"""What a rollout costs: rollouts a minute, CPU seconds each, beside the peers in the same minutes."""
