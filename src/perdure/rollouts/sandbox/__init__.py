"""The sandbox of a stage: create it, keep it alive, check that sandboxes work; its host's term."""
