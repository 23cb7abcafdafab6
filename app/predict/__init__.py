"""Predicting speed and fit from a model's shape and a machine's bandwidth; the fits and published figures behind it."""

DEFAULT_CONTEXT = 4096
"""Tokens in the cache that a prediction is for where nobody says."""
