"""Checkpoint directories as untrusted input: safetensors headers, JSON, quantization, integrity."""
