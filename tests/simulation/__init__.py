"""The machines of ``asyncckpt/protocol``, tried under seeded orders of events."""
