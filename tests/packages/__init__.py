"""Datasets of other packages on our workers: what works, by which start method, with what state."""
