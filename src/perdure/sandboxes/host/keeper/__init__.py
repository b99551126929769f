"""Programs that run on this host for one sandbox, each in its own process."""
