"""Conversion between text and token ids: tokenizer, templates, control tokens, stop strings, thinking, answers."""
