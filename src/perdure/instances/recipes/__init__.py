"""Makes the instances of a dataset from its `dataset.toml` and the builders that it names."""
