"""Reads what code in a sandbox wrote, in a child process with limits."""
