"""What people touch: command line, terminal UI, reports. The only floor that prints, draws or parses arguments."""
