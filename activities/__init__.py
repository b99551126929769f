"""The temporal shells: each calls the library once and writes one checkpoint."""
