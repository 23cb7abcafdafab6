"""One file a screen or dialog, and what only screens use."""
