"""The stages of a rollout, without Temporal: the activities call them."""
