"""Thin adapters that turn Perdure's episodes into the objects of installed trainers."""
