"""Programs that run inside vLLM, never in a process of Perdure."""
