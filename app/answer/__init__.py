"""Options of an answer: one table for every command, setting and file."""
