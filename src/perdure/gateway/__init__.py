"""The token-capturing endpoint that agents call."""
