"""Batches: a file of requests parsed, answered side by side, and written to a file of results."""
