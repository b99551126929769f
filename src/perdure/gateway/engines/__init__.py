"""Engine clients: one file per kind of inference server behind the gateway."""
