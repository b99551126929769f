"""The sandbox of a stage: admitted by its account, created, or taken from the ready ones."""
