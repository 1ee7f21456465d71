"""Helpers that tests share: states, ranks, faulty workers, other packages."""
