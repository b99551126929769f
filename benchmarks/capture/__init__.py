"""How much of what was sampled is trained, beside slime: see docs/benchmarks.md."""
