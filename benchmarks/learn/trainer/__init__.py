"""The trainer's side, in the environment that has torch and transformers."""
