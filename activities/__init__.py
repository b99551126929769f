"""The activities of Temporal. Each makes one call into `perdure.rollouts`."""
