"""Scores of a patch by a reward model behind HTTP, or by a judge with a rubric."""
