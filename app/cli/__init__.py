"""The command line: a file or a folder per command, and helpers that only commands use."""
