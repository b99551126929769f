"""Computes figures, comparisons and plots from a run's episodes."""
