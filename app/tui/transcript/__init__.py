"""The transcript: messages, Markdown, rows, and the welcome text.

shown_branch.py: a conversation's messages -> transcript.py (the widget) -> entry.py: rows of each message
entry.py -> growing_markdown.py -> markdown_lines.py: lines of Markdown; row_strips.py draws rows
"""
