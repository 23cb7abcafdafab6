"""Showing what was measured: tables, live progress, text formats, the HTML report."""
