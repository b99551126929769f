"""The `perdure` command: parses before it imports anything heavy."""
