"""Loads new weights into running engines, and proves that they were loaded."""
