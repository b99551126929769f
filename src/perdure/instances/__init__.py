"""Rows of each dataset become an Instance; builders and environments live here too."""
