"""What polls which task queue with how many slots."""
