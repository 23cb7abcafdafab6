"""Stored sessions: a SQLite database of message trees. Imports no engine and no terminal."""
