"""From a command line to a run, and from a run to its table."""
