"""The relay's program inside the sandbox: standard library only."""
