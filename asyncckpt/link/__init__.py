"""The processes of one host: start a worker or find one, sockets, messages, locks. Import no torch."""
