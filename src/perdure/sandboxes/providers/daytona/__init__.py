"""The `daytona` provider."""
