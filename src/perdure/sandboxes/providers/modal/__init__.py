"""The `modal` provider."""
