"""One turn: the turn that it continues, its prompt, its sampling, and how its sampled ids are read."""
