"""Checks whether transformers computes the recorded logprobs for the recorded tokens."""
