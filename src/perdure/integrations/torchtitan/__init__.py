"""TorchTitan's rollouter: rollouts of Perdure, sampled by the trainer's own generator."""
