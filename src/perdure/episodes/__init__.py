"""Cuts turns into segments, builds episodes, and converts both into trainers' formats."""
