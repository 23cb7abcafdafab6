"""The engine process of the chat: client and link on the chat's side, process and host on its own, messages."""
