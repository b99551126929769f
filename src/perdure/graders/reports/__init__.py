"""Turns the output of a test run into one status per test."""
