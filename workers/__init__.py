"""The worker processes: which polls which task queue, and with how many slots."""
