"""The Temporal activities. Each makes one call into `perdure.rollouts`."""
