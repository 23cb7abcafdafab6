"""The transcript: messages, Markdown, rows, and the welcome text."""
