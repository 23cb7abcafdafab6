"""Cost of a decode step and memory use, from shapes alone."""
