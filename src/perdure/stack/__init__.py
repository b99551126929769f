"""The local stack: the processes that `perdure up` starts, supervises and stops."""
