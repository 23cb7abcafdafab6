"""The whole program for hours: `python -m tests.soak` says how."""
