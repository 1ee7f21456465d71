"""The state machines of a save, without input, output, threads or clocks."""
