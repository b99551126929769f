"""Measures the cost of a crash: repeated model calls, leaked sandboxes, lost results."""
