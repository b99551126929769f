"""`perdure view`: a local, read-only web server to browse runs and read trajectories."""
