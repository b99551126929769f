"""Reads results that other programs left: Harbor, Inspect, mini-swe-agent, SWE-bench."""
