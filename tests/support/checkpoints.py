"""Hand-written safetensors directories, valid or broken on purpose."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = {"model_type": "llama"}
# A config.json with all that a decoder needs.
WHOLE_CONFIG = {
    **CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 100, "max_position_embeddings": 256,
}  # fmt: skip
WIDTH = {"F32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1}


def tensor(dtype: str, shape: list[int], begin: int) -> dict[str, Any]:
    """Return a valid header entry of a tensor at byte `begin` of the data."""
    count = 1
    for side in shape:
        count *= side
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + count * WIDTH[dtype]]}


def header() -> dict[str, Any]:
    """Return a valid header of three tensors of 16 + 12 + 8 bytes."""
    return {
        "__metadata__": {"format": "mlx"},
        "a.weight": tensor("F32", [2, 2], 0),
        "a.scales": tensor("F16", [2, 3], 16),
        "b.weight": tensor("F32", [2, 1], 28),
    }


def shard(entries: Mapping[str, Any] | bytes, data: int = 36, length: int | None = None) -> bytes:
    """Return a shard: header (an object or bytes) and `data` zero bytes; `length` overrides the header length."""
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def write(
    directory: Path,
    shards: Mapping[str, bytes] | None = None,
    *,
    config: Any = CONFIG,
    index: Any = None,
) -> Path:
    """Write a model directory; valid with a single shard by default."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    for name, content in ({"model.safetensors": shard(header())} if shards is None else shards).items():
        (directory / name).write_bytes(content)
    if index is not None:
        raw = index if isinstance(index, bytes) else json.dumps(index).encode()
        (directory / "model.safetensors.index.json").write_bytes(raw)
    return directory
