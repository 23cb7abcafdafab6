"""What is typed: the prompt, its fields, completion, slash commands, the clipboard."""
