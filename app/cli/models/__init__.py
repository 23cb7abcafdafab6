"""`headrace models`, and `pull`, `list` and `rm`."""
