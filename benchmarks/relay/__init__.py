"""What each way from a sandbox to the gateway adds to a model call, and what it costs at rest."""
