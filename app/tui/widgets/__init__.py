"""Widgets that draw lines of text, and their style cache."""
