"""How fast `perdure status` answers beside thousands of rollouts."""
