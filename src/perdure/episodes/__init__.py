"""Cuts turns into segments, builds episodes, and converts both to trainers' formats."""
