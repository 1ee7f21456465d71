"""Devices: streams and events of each kind, memory that they copy to and from directly, graphs."""
