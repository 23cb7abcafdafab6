"""Command line, terminal UI and reports: the only layer that prints, draws or parses arguments."""
