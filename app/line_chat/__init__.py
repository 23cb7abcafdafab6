"""The chat line by line, for TERM=dumb and screen readers: no redraw, no cursor movement, no colour."""
