"""What is in a model's directory: safetensors headers, JSON, quantization, whether it is whole."""
