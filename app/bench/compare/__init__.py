"""Comparison of benchmark documents, saved runs, and significance."""
