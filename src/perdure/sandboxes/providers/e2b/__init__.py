"""The `e2b` provider."""
