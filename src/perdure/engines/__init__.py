"""What an inference engine is: its state, its clients, its pool and its weights."""
