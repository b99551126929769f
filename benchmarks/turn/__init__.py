"""Measures the gateway's CPU per model call, by length of the history and kind of journal."""
