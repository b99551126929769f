"""Takes a diff out of the agent's tree, parses it, and filters it for the grader."""
