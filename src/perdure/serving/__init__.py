"""Engines as things that live and die: their states, their watch, their weights."""
