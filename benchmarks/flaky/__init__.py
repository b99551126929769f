"""What a flaky control plane costs: rollouts, seconds, sandboxes."""
