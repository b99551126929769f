"""Training data without rewards: conversations of good rollouts, and preference pairs."""
