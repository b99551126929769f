"""Thin adapters: Perdure's episodes as the objects of the trainers that are installed."""
