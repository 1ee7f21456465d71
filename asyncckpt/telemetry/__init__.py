"""Adapters for events (``asyncckpt.events``). Give one to ``Config.on_event`` to send events to a monitoring system."""
