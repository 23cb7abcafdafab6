"""Text on both sides of the token ids: tokenizer, templates, control tokens, stop strings, thinking, whole answers."""
