"""The sandbox of a stage: created, kept alive, tried, and the term of its host."""
