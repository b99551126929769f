"""The coding-agent harnesses, one file per agent."""
