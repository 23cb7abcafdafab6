"""Comparing what was measured: documents, saved runs, significance."""
