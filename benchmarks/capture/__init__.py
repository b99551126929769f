"""What share of the sampled tokens is trained, compared with slime: see docs/benchmarks.md."""
