"""Where the agent or the grader runs: one contract, one file per provider."""
