"""Chains: the batches that one gateway process writes to the store, one after the other."""
