"""Which engine a session's next turn goes to, by how much of its prompt that engine still knows."""
