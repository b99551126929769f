"""Segments, episodes and the shapes trainers consume."""
