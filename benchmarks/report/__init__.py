"""What `perdure report` costs for a large run."""
