"""An installed model with one flipped bit in its weights."""

import shutil
from pathlib import Path

from headrace.models.registry.store import Store


def install_damaged(model: Path, name: str = "mine") -> None:
    """Install the model in this directory under `name`, then flip a bit near the end of its weights."""
    store = Store()
    store.install(name, lambda folder: {"source": str(shutil.copytree(model, folder, dirs_exist_ok=True))})
    weights = store.root / name / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
