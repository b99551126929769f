"""Rows of the public datasets: one file per format, and what the formats share."""
