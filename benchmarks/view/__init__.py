"""Pages of a large run."""
