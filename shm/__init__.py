"""Memory: segments, the header page with the states of the slots, and how much may be taken. No torch here."""
