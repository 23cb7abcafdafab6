"""Effect of K/V formats and of quantization on a model's logits, against a reference."""
