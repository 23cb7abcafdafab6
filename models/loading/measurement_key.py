"""Key of a measurement that is kept on disk for the weights that it was made with.

`activation_choice` and `app.quantize.sensitivity` keep their figures under it.

Guard: tests/models/loading/test_measurement_key.py.
"""

import hashlib
import json

from headrace.models.checkpoint.gguf_link import file_facts
from headrace.models.checkpoint.safetensors import Checkpoint


def measurement_key(checkpoint: Checkpoint, *conditions: object) -> str:
    """Hash the identity of the weights' files, the config and the conditions, which are JSON values.

    An adapter's file is one of the files. Links to a file have the identity of the file.
    """
    adapter = checkpoint.adapter
    files = list(checkpoint.files)
    if adapter is not None:
        files.append(adapter.file)
    identities = [(str(file.resolve()), file_facts(file)) for file in files]
    content = [identities, checkpoint.config, conditions]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
