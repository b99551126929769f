"""Turns the rows of each dataset into instances; also builders and environments."""
