"""One supervised worker on every node of a Ray cluster: `perdure workers`."""
