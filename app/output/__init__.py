"""Sanitised text, tables and progress on terminals, pipes and files."""
