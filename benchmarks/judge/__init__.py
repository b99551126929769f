"""How often a reader who holds one text of a hidden test tells the original from its twin."""
