"""Agreement among the ranks that save together."""
