"""The process that owns the staging memory and writes it to storage. No torch here."""
