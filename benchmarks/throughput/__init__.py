"""Rollouts a minute where the model takes real time, next to Harbor and mini-swe-agent's batch runner."""
