"""Fuzzing of everything that reads external input, with format-aware mutations.

See `python -m tests.fuzz` for usage and `tests/fuzz/target.py` for targets.
"""
