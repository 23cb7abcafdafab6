"""The decode world: token ids in, token ids out. Knows no text, no file format, no terminal."""
