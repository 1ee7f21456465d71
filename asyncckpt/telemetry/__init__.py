"""Adapters that bring events (``asyncckpt.events``) to where people look: each is given to ``Config.on_event``."""
