"""The chat line by line: plain for TERM=dumb and screen readers, or inline, with rendered answers in the scrollback."""
