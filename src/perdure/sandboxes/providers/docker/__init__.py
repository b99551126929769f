"""The `docker` provider."""
