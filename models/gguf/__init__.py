"""GGUF file -> MLX-format model directory, converted once.

A GGUF file comes from anywhere, so every number in it is checked before it is acted on (`header`). What it describes
is then rewritten as the directory any MLX or Hugging Face reader understands (`convert`). This package imports numpy
and the `gguf` library: import it where a conversion happens, never on the way to an already converted model.
"""

from headrace.models.gguf.convert import convert_gguf

__all__ = ["convert_gguf"]
