"""The workflows: they order the activities deterministically and do nothing else."""
