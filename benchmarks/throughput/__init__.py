"""Measures rollouts per minute with a slow model, next to Harbor and mini-swe-agent's batch runner."""
