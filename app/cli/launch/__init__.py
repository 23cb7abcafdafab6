"""`headrace launch`: agents, and the server that they talk to."""
