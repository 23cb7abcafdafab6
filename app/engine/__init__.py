"""The engine in a process of its own: the chat's side (client, link), its own (process, host), their messages."""
