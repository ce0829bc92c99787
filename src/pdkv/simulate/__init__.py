"""Whole P/D systems under virtual time: the real `core`, with everything outside it simulated."""
