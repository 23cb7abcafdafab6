"""Loading: from a checkpoint to a network and a tokenizer that fit into memory, draft models, quantized copies."""
