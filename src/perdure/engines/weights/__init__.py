"""New weights for running engines, and the proof that they were loaded."""
