"""Checkpoint directories as untrusted input: safetensors headers, JSON, quantization, integrity.

safetensors.py   `open_checkpoint`: headers and JSON alone, by shard_header.py and side_file.py
  normalize.py   one form of config.json, with its types checked
  foreign/       weights that other tools have quantized; gguf_link.py: weights in a GGUF
text_part.py     the language model's tensors under their usual names; quantization.py has their settings
arrays.py        the weights, lazily, converted from foreign layouts; file_parts.py cuts them before they are read
validation.py    whether an installed model is whole
"""
