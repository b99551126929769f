"""The token-capturing endpoint that agents talk to."""
