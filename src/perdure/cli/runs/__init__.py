"""Code that several commands share about a run: its request, its progress, its results."""
