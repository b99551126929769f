"""What new weights cost the requests in flight, and whether each token keeps its version."""
