"""The stages of a rollout as functions that know nothing of Temporal. The activities call them."""
