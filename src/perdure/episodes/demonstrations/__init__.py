"""What a model learns from without a reward: conversations of good rollouts, and pairs of a better and a worse one."""
