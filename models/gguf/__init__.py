"""Conversion of GGUF files to MLX-format model directories.

GGUF files are untrusted: `header` checks every number before it is used. This package imports numpy and the `gguf`
library, so import it only where a conversion happens.
"""

from headrace.models.gguf.convert import convert_gguf

__all__ = ["convert_gguf"]
