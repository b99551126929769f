"""The stages of a rollout, as functions that do not depend on Temporal. Activities call them."""
