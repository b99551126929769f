"""The wire formats agents speak, one file per dialect."""
