"""Options of an answer, its request and its text: one way for every command, setting and file."""

MAX_RUNNING = 16
"""Answers that are generated at a time, unless more or fewer are asked for."""
