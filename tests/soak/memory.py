"""The memory that is predicted for a model, and the most that a process took which answered with it.

For a process of its own: its peak is of all that it ever did.
"""

import resource
import sys

from headrace.models.cost.costs import shape_to_run, working_memory
from headrace.models.load import load_resolved
from headrace.models.registry.resolve import resolve
from headrace.runtime.cost import held_bytes
from headrace.runtime.engine import Engine
from headrace.runtime.kv_format import FLOAT16, KVFormat
from headrace.runtime.request import Request
from headrace.runtime.sampling import SamplingParams

_LAST = 40  # tokens of a context that are generated
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def predicted_memory(name: str | None, context: int, kv: KVFormat = FLOAT16) -> tuple[int, int]:
    """(bytes that a process is predicted to take, as before loading; the most that this one took for the context)."""
    loaded = load_resolved(resolve(name), context=context, kv=kv)
    engine = Engine(loaded.network, context_limit=context)
    prompt = [1] * (context - _LAST)
    for _ in engine.generate(Request(prompt, max_tokens=_LAST, sampling=SamplingParams(temperature=0.0))):
        pass
    entries, weights = held_bytes(loaded.network.cost.kv, context), loaded.checkpoint.nbytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    return weights + entries + working_memory(shape_to_run(loaded.checkpoint)), peak
