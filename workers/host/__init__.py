"""A worker's host: its signs of life, its seats, its housekeeping."""
