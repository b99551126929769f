"""Runs thousands of rollouts on one machine, with a kill -9 every minute."""
