"""Models: checkpoints, downloads and the store, tokenizers, networks, and their step costs."""
