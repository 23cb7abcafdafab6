"""The transcript: messages, Markdown and rows.

shown_branch.py: a conversation's messages -> transcript.py (the widget) -> entry.py: rows of each message
entry.py -> growing_markdown.py -> markdown_lines.py: lines of Markdown; row_strips.py draws rows
"""
