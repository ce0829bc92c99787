"""Ways to read a peer's memory one-sided; each is owned and called by the mover's one thread only."""
