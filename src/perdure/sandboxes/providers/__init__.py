"""The sandbox providers, one file or folder each."""
