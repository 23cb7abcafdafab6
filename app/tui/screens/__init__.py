"""Screens and dialogs, one per file, and their shared parts.

    chat_screen.py: widgets, keys and messages -> chat_actions.py, message_actions.py: slash commands
                                               -> chat_view.py: brings the widgets up to date
    chat_state.py: engine, store and conversation, for every screen
    welcome.py, notices.py: the text of an empty conversation, and the lines above the prompt
    parallel_screen.py: base of compare_screen.py and again_screen.py; dialogs.py: small questions
    list_screen.py: base of models_screen.py, sessions_screen.py and tree_screen.py

A slash command is a row in `app/chat/commands.py` and a function in one of the two files of actions.
"""
