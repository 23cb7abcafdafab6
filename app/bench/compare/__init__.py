"""Comparing what was measured: documents, saved runs, ratios, significance."""
