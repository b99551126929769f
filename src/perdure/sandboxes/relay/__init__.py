"""The agent's way to the gateway from a sandbox that cannot reach it."""
