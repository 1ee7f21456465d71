"""What the tests share: states, ranks, workers that fail, other packages."""
