"""GGUF files as MLX-format model directories: converted once, or tensor by tensor whenever they are read.

GGUF files are untrusted: `header` checks every number before it is used. This package imports numpy and the `gguf`
library, so import it only where a file is read.
"""

from headrace.models.gguf.convert import convert_gguf, link_gguf

__all__ = ["convert_gguf", "link_gguf"]
