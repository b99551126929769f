"""`perdure engines`: replicas that Ray runs for this home, and engines that run elsewhere."""
