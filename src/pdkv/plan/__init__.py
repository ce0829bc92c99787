"""Sizing without a GPU: a model and an amount of memory in, exact capacity out. Needs no torch."""
