"""Predicting speed and fit from a model's shape and a machine's bandwidth; the fits and published figures behind it."""
