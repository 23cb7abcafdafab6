"""The conversation on the screen: messages, Markdown, rows and what an empty one shows."""
