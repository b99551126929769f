"""The trainer's side. It runs in the environment that has torch and transformers."""
