"""Prepares the repository and the tree that come with an image."""
