"""Sandboxes elsewhere, from the host's side: durable commands through a guest program."""
