"""Throughput of one, two and four hosts, each capped at a share of a core."""
