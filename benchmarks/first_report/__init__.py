"""From a clone to the first report."""
