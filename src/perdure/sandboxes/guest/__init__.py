"""The host's side of sandboxes on other hosts: durable commands through a guest program."""
