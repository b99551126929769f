"""The `kubernetes` provider."""
