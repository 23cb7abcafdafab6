"""Predicted memory of a model, and the peak of a process that answered with it.

Needs a process of its own, since a peak never falls.
"""

from headrace.models.cost.costs import loaded_weight_bytes, shape_to_run, working_memory
from headrace.models.loading.load import load_resolved
from headrace.models.registry.resolve import resolve
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.metrics.cost import held_bytes
from headrace.runtime.ops.kv_format import FLOAT16, KVFormat
from headrace.runtime.sampling.params import SamplingParams
from tests.support.peak_memory import peak_bytes

_LAST = 40  # tokens of a context that are generated


def predicted_memory(name: str | None, context: int, kv: KVFormat = FLOAT16) -> tuple[int, int]:
    """Return (bytes predicted as before loading, peak bytes of this process for the context)."""
    loaded = load_resolved(resolve(name), context=context, kv=kv)
    engine = Engine(loaded.network, context_limit=context)
    prompt = [1] * (context - _LAST)
    for _ in engine.generate(Request(prompt, max_tokens=_LAST, sampling=SamplingParams(temperature=0.0))):
        pass
    shape = shape_to_run(loaded.checkpoint)
    entries = held_bytes(loaded.network.cost.kv, context)
    return loaded_weight_bytes(loaded.checkpoint, shape) + entries + working_memory(shape), peak_bytes()
