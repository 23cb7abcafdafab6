"""The chat as a terminal application. The one package that may import textual.

    app.py (HeadraceApp) -> screens/ -> transcript/, input/, decode/, widgets/
    poller.py: ten times a second, engine events -> metrics/ and the conversation (`app.chat`) -> what changed is drawn

Nothing is drawn per token, and no widget reads the engine. `top.py` is the same view of a server.
"""
