"""Programs that run in the sandbox, in the agent's own Python, where Perdure is not installed."""
