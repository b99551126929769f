"""Programs that run beside one sandbox on this host, each a process of its own."""
