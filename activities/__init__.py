"""The temporal shells: each makes one call into `perdure.rollouts`."""
