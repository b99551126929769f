"""What a lost sandbox costs: how many recorded tokens its successor need not sample again."""
