"""The chat as a terminal application. The one package that may import textual."""
