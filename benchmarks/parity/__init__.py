"""Whether transformers gives the recorded tokens the logprobs that were recorded for them."""
