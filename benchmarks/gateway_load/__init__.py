"""What a gateway adds to a model call under many sessions, and what it needs for it."""
