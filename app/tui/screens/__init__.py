"""Screens and dialogs, one per file, and their shared parts."""
