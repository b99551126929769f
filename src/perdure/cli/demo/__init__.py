"""`perdure demo`: its scripted agents, and the faults of `--break`."""
