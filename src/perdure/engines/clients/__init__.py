"""Clients of inference servers: token endpoints, hosted APIs, control routes."""
