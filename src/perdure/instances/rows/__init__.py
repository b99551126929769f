"""Converts rows of public datasets: one file per format, and the code that formats share."""
