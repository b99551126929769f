"""What a crash costs: model calls bought again, sandboxes left behind, results lost."""
