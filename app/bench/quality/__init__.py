"""What a format of K/V, or of weights, does to what a model says: its logits beside those of a reference."""
