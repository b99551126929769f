"""Converts messages to token ids and back, in each model's own format."""
