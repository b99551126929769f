"""A TorchTitan rollouter: Perdure's rollouts, sampled by the trainer's own generator."""
