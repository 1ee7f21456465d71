"""Save calls that people already have, made asynchronous."""
