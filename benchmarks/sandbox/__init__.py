"""Measures the cost of a sandbox: boot to first exec, exec, kill."""
