"""What a run came to: figures, comparisons and plots from its episodes."""
