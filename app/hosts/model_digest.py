"""Digest of a model directory, to compare copies on several machines before weights are read.

It covers names and sizes of all files, small files whole, and of each weight file its header and samples at even
distances. So it takes milliseconds for any model, and tells apart models, formats and fine-tuned weights.
"""

from hashlib import blake2b
from pathlib import Path

_SUFFIXES = (".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja")
_NOT_COMPARED = ("headrace.json",)  # the store's own notes
_WHOLE = 1 << 20  # bytes; larger files are sampled
_SAMPLES = 32
_SAMPLE = 4 << 10


def model_digest(directory: Path) -> str:
    """Return the digest in hex. Raises OSError."""
    key = blake2b(digest_size=16)
    files = sorted(file for file in directory.iterdir() if file.suffix in _SUFFIXES and file.name not in _NOT_COMPARED)
    for file in files:
        size = file.stat().st_size
        key.update(f"{file.name}\n{size}\n".encode())
        with file.open("rb") as content:
            if size <= _WHOLE:
                key.update(content.read())
                continue
            for sample in range(_SAMPLES):
                content.seek((size - _SAMPLE) * sample // (_SAMPLES - 1))
                key.update(content.read(_SAMPLE))
    return key.hexdigest()
