"""What one bubblewrap sandbox costs: boot to first exec, exec, kill."""
