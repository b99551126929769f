"""`perdure view`: a local, read-only page to browse runs and to read trajectories."""
