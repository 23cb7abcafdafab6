"""What people touch: command line, terminal UI, reports. The only layer that prints, draws or parses arguments."""
