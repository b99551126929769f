"""What sandboxes on this host share: their folder, their commands, their limits."""
