"""Programs that run inside the sandbox, in the agent's own Python: Perdure is not installed there."""
