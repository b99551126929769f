"""The durable record of every turn."""
