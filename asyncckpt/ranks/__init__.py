"""How the ranks that save together come to one answer."""
