"""Inputs that are wrong in the way of their format, by the million, against everything that reads what others wrote.

`python -m tests.fuzz` says how to run it, `tests/fuzz/target.py` what a target is.
"""
