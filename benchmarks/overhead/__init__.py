"""Measures rollouts per minute and CPU seconds per rollout, compared with the peers."""
