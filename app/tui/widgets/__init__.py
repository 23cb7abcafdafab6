"""Widgets that draw lines of text: bars of keys and status, and the base of the decode view's sections.

They make their own lines and strips, since textual's general way costs more while an answer streams
(docs/workarounds.md has the figures).
"""
