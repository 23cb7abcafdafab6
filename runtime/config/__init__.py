"""Environment variables, folders, and files written whole."""
