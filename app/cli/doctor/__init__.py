"""`headrace doctor`: facts of this machine and of others, problems and remedies."""
