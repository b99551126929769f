"""Engines and gateways killed under load."""
