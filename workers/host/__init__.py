"""A worker's host: its heartbeats, its seats, its housekeeping."""
