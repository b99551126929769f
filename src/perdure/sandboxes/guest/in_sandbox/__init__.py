"""Programs that run inside a remote sandbox: standard library only."""
