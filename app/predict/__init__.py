"""Prediction of speed and memory from a model's shape and a machine's bandwidth."""

DEFAULT_CONTEXT = 4096
"""Default tokens in the cache."""
