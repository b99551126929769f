"""Graders, one per protocol: `swebench` and `eval_cmd` are general, the others serve one
dataset."""
