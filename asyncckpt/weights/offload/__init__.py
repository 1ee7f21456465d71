"""Parameters that are kept off the device, and brought back for a sync."""
