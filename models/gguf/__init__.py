"""GGUF files as MLX-format model directories: converted once, or tensor by tensor whenever they are read.

    header.py -> ollama.py, container.py, metadata.py   what a file says
    architectures/ (rows of architecture.py) -> config.py, names.py   config.json, and what each tensor becomes
    convert.py    a copy or a link; tensors.py converts numbers, parts.py those of a link whenever they are read
    tokenizer.py  tokenizer.json; adapter.py   adapters

GGUF files are untrusted: `header` checks every number before it is used. This package imports numpy and the `gguf`
library, so import it only where a file is read.
"""

from headrace.models.gguf.convert import convert_gguf, link_gguf

__all__ = ["convert_gguf", "link_gguf"]
