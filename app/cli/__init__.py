"""The command line: one file a command, and what only commands use. Prints, parses arguments, sets exit codes."""
