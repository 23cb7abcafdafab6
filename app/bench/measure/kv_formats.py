"""One model with K/V in several formats, measured side by side as models of their own.

They share the weights. Ratios compare every format with the first, paired by round. For a single format `in_formats`
returns the model as it is, `check_memory` checks nothing, and there are no ratios.

Guard: tests/app/bench/measure/test_kv_formats.py.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from headrace.app.bench.measure.ratios import paired_ratio
from headrace.app.bench.measure.records import KVRatio, Result
from headrace.app.config.load_options import kv_choice
from headrace.models.cost.costs import shape_to_run, working_memory
from headrace.models.loading.load import LoadedModel, with_kv
from headrace.runtime.errors import UsageError
from headrace.runtime.machine import memory
from headrace.runtime.ops.kv_format import kv_format

# llama.cpp's names of the formats in which it is compared: keys of `KV_TYPES` in children/llama_cpp_child.py.
_LLAMA_CPP_NAMES = {"f16": "f16", "q8": "q8_0"}


def check_formats(formats: Sequence[str], peers: Sequence[str]) -> None:
    """Raise UsageError for unknown formats, `auto` among others, and formats that a peer lacks.

    formats: names as in --kv, at least one.
    peers: names as in --vs.
    """
    for name in formats:
        kv_choice(name)  # raises for an unknown one
    if "auto" in formats and len(formats) > 1:
        raise UsageError("--kv auto chooses one format: leave the others out")
    if peers and len(formats) > 1:
        raise UsageError("--vs needs one K/V format")
    kv = formats[0]
    for peer in peers:
        peer_formats = tuple(_LLAMA_CPP_NAMES)
        if peer == "mlx-lm":
            peer_formats = ("f16",)
        if kv not in peer_formats:
            raise UsageError(
                f"{peer} has no comparable K/V format {kv}",
                "use f16, or q8 with llama.cpp (its q8_0)",
            )


def peer_kv_type(kv: str) -> str:
    """Return llama.cpp's name of our K/V format."""
    return _LLAMA_CPP_NAMES[kv]


def in_formats(model: LoadedModel, formats: Sequence[str]) -> list[LoadedModel]:
    """Return the loaded model once per format, named after it. Raises UsageError for a format it cannot have."""
    if len(formats) < 2:
        return [model]
    models: list[LoadedModel] = []
    for name in formats:
        kv = kv_format(name)
        models.append(replace(model, name=f"{model.name} {name}", network=with_kv(model.network, kv), kv=kv))
    return models


def check_memory(models: Sequence[LoadedModel], tokens: int) -> None:
    """Raise NotEnoughMemoryError unless caches fit.

    models: one loaded model in several formats; a cache for each is needed. One format was checked as it was loaded.
    tokens: entries of a cache.
    """
    budget = memory.budget()
    if budget is None or len(models) < 2:
        return
    weights = models[0].network.cost.weight_bytes
    caches = sum(model.network.cost.kv_bytes(tokens) for model in models)
    overhead = working_memory(shape_to_run(models[0].checkpoint))
    # `check_fits` counts the weights, which are in memory already: so they count as free, too.
    limit = replace(budget, free=budget.free + weights)
    memory.check_fits(weights, caches, overhead, limit, tokens)


def kv_ratios(results: Sequence[Result], models: Sequence[LoadedModel]) -> list[KVRatio]:
    """Return the speed of every further format over the first one's, with 95 % intervals."""
    own_results = [entry for entry in results if entry.engine == "headrace"]
    base = models[0].name
    base_by_test = {_test(entry): entry for entry in own_results if entry.model == base}
    rows: list[KVRatio] = []
    for model in models[1:]:
        for entry in own_results:
            base_entry = base_by_test.get(_test(entry))
            if entry.model == model.name and base_entry is not None:
                rows.append(KVRatio(entry.test, entry.depth, model.name, base, *paired_ratio(entry, base_entry)))
    return rows


def _test(entry: Result) -> tuple[str, int, int]:
    return entry.test, entry.depth, entry.batch
