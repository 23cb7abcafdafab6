"""The engine below all surfaces: token ids in, token ids out. Knows no text, no file format, no terminal.

It imports neither `models` nor `app`; import contracts in pyproject.toml guard that.
"""
