"""Soak test of the whole program; see `python -m tests.soak`."""
