"""Messages to token ids and back, by each model's own format."""
