"""Doubles that speak the real wire protocols, and the contract suites: shipped and documented."""
