"""Models in a folder laid out as Ollama's store."""

import json
from hashlib import sha256
from pathlib import Path

from tests.support.gguf_models import write_adapter, write_gguf


def add_to_ollama(home: Path, name: str, *, adapters: int = 0) -> Path:
    """Write a GGUF and its manifest as Ollama does; name: HOST/NAMESPACE/MODEL/TAG. Return the blob.

    adapters: so many times the same.
    """
    folder = home / ".ollama" / "models"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    made = write_gguf(home / "made.gguf", "llama")
    digest = sha256(made.read_bytes()).hexdigest()
    blob = made.rename(folder / "blobs" / f"sha256-{digest}")
    write_adapter(blob.with_name("sha256-ada"), "llama")
    blobs = [("model", digest), ("license", digest), *[("adapter", "ada")] * adapters]
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{each}", "size": 1}
        for kind, each in blobs
    ]
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return blob
