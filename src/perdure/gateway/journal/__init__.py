"""The durable record of every turn: on this host's disk, in the store, or both."""
