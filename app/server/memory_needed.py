"""Memory that a model needs, from its headers, before it is loaded."""

from headrace.app.config.load_options import kv_choice
from headrace.app.engine.commands import ModelSpec
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import loaded_weight_bytes, working_memory
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.loading.decoder_choice import context_length
from headrace.models.registry.resolve import resolve
from headrace.runtime.errors import HeadraceError


def memory_needed(spec: ModelSpec) -> int | None:
    """Return the bytes of weights, K/V of one full context, and working memory; None if they are unknown.

    Broken files and unknown architectures are for the load to report.
    """
    try:
        checkpoint = open_checkpoint(resolve(spec.name, fetch=False).path)
        shape = shape_of_checkpoint(checkpoint)
        weights = loaded_weight_bytes(checkpoint, shape)
    except HeadraceError:
        return None
    kv = kv_choice(spec.kv)
    if kv is not None and kv != "auto":
        shape = shape.with_kv(kv)
    return weights + shape.cost.kv_bytes(spec.context or context_length(checkpoint)) + working_memory(shape)
