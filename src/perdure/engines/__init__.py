"""Inference engines: their state, their clients, their pool and their weights."""
