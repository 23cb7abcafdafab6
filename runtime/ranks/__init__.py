"""Several machines as ranks of one model: collectives, the control channel, and passes that followers repeat."""
