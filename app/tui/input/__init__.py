"""Text input: the prompt, its fields, completion, search bars, the editor, the clipboard.

Widgets here post messages, and have no conversation; the screens carry out commands and send text. Text fields are
`Field` or `Area` (`fields.py`), so that keys keep their order and text is sanitised.
"""
