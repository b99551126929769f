"""The verdict on a patch: capture, filter, and one file per grading protocol."""
