"""Measures the latency that a gateway adds to a model call under many sessions, and its CPU and memory."""
