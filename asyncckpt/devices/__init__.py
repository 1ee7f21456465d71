"""Devices: streams and events of each kind of device, pinned host memory for direct copies, and graph captures."""
