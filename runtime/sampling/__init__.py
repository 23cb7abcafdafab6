"""Token selection: logits to token ids, with a random key per position."""
