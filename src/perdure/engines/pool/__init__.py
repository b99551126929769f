"""The engines of one gateway process: which one takes a call, and what survives when it dies."""
