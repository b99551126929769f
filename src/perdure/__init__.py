"""Perdure: durable SWE coding-agent rollouts that become graded, token-exact training episodes."""
