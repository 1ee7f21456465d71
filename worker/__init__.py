"""The worker process: own the staging memory, and write it to storage. Import no torch."""
