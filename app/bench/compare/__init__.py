"""Comparison of benchmark documents, and its significance."""
