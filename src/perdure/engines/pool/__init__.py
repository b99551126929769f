"""The engines of one gateway process: assigns calls to engines, and salvages the calls of failed ones."""
