"""The document of `headrace bench --quality`; its schema is docs/quality-json.md."""

import hashlib
import shlex
import sys
import time
from collections.abc import Sequence

from headrace.app.bench.measure.document import device_document, model_document
from headrace.app.bench.quality.figures import BLOCK, figures
from headrace.app.bench.quality.text import SHIPPED
from headrace.app.bench.quality.variants import Options, Variant
from headrace.app.output.document import Document
from headrace.app.versions import versions
from headrace.models.loading.load import LoadedModel
from headrace.runtime.machine.hardware import machine

SCHEMA = "headrace-quality/1"


def document(
    reference: LoadedModel,
    others: Sequence[LoadedModel],
    options: Options,
    variants: Sequence[Variant],
    notes: Sequence[str],
    *,
    interrupted: bool,
) -> Document:
    """Return the document. notes: variants left out, and why."""
    file = options.text or SHIPPED
    return {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["headrace", *sys.argv[1:]]),
        "interrupted": interrupted,
        "device": device_document(machine(), None),
        "reference": model_document(reference),
        "against": [model_document(other) for other in others],
        "engines": [variant.peer.setup.document() for variant in variants if variant.peer],
        "text": {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
        "scored": options.scored,
        "block": BLOCK,
        "versions": versions(),
        "results": [entry for variant in variants for entry in _entries(variant, reference)],
        "notes": [*notes, *(note for model in (reference, *others) for note in model.notes)],
    }


def _entries(variant: Variant, reference: LoadedModel) -> list[Document]:
    """Return a variant's entries: all conditions together, then each by itself."""
    cost, usual = variant.network.cost if variant.network else None, reference.network.cost
    facts = {
        "variant": variant.name,
        "kind": variant.kind,
        "kv_bytes_per_token": cost and cost.kv_bytes_per_token,
        "kv_bytes_ratio": cost and cost.kv_bytes_per_token / usual.kv_bytes_per_token,
        "weight_bytes_per_step": cost and cost.weight_bytes,
    }
    every = {**facts, "depth": None, "phase": None, "tokens_per_second": None}
    every |= figures(list(variant.found.values()))
    each = [
        {
            **facts,
            "depth": depth,
            "phase": phase,
            "tokens_per_second": variant.speeds.get((depth, phase)),
            **figures([found]),
        }
        for (depth, phase), found in variant.found.items()
    ]
    return [every, *each] if len(each) > 1 else each
