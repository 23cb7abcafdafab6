"""The command line: one file per command, and helpers that only commands use."""
