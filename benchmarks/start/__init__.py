"""What `perdure up` costs."""
