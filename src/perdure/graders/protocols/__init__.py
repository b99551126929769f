"""Graders, one per protocol. `swebench` and `eval_cmd` serve many datasets."""
