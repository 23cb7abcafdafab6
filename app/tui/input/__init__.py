"""Text input: the prompt, its fields, completion, slash commands, the clipboard."""
