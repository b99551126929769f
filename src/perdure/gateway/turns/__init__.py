"""One turn: which turn it continues, its prompt, its sampling, and what the sampled ids say."""
