"""Training data without rewards: conversations of good rollouts, and pairs of a better and a worse
one."""
