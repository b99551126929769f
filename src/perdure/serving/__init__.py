"""Engine servers on Ray: starts, watches and replaces them."""
