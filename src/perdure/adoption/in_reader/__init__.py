"""Programs that run where Harbor or Inspect is installed."""
