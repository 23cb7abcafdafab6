"""Conversations that last: a SQLite database of sessions, each a tree of messages. Knows no engine and no terminal."""
