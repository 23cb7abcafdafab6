"""One model with K/V in several formats, measured side by side as models of their own.

They share the weights. Ratios compare every format with the first, paired by round.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.app.bench.measure.ratios import paired_ratio
from headrace.app.bench.measure.records import KVRatio, Result
from headrace.app.config.load_options import kv_choice
from headrace.models.cost.costs import shape_to_run, working_memory
from headrace.models.loading.load import LoadedModel, with_kv
from headrace.runtime.errors import UsageError
from headrace.runtime.machine import memory
from headrace.runtime.ops.kv_format import kv_format

_PEERS = {"f16": "f16", "q8": "q8_0"}  # llama.cpp's names of the formats it is compared in


def check_formats(formats: Sequence[str], peers: Sequence[str]) -> None:
    """Raise UsageError for unknown formats, `auto` among others, and formats that a peer lacks."""
    for name in formats:
        kv_choice(name)
    if "auto" in formats and len(formats) > 1:
        raise UsageError("--kv auto chooses one format: leave the others out")
    if peers and len(formats) > 1:
        raise UsageError("--vs needs one K/V format")
    for peer in peers:
        if formats[0] != "f16" and (peer == "mlx-lm" or formats[0] not in _PEERS):
            raise UsageError(
                f"{peer} has no comparable K/V format {formats[0]}",
                "use f16, or q8 with llama.cpp (its q8_0)",
            )


def peer_kv_type(kv: str) -> str:
    """Return llama.cpp's name of our K/V format."""
    return _PEERS[kv]


def in_formats(model: LoadedModel, formats: Sequence[str]) -> list[LoadedModel]:
    """Return the loaded model once per format, named after it. Raises UsageError for a format it cannot have."""
    if len(formats) < 2:
        return [model]
    return [
        replace(model, name=f"{model.name} {name}", network=with_kv(model.network, kind), kv=kind)
        for name, kind in zip(formats, map(kv_format, formats), strict=True)
    ]


def check_memory(models: Sequence[LoadedModel], tokens: int) -> None:
    """Raise NotEnoughMemoryError unless a cache of `tokens` fits for each of `models`, whose shared weights are
    loaded.
    """
    free = memory.budget()
    weights = models[0].network.cost.weight_bytes
    if free is not None and len(models) > 1:
        caches = sum(model.network.cost.kv_bytes(tokens) for model in models)
        overhead = working_memory(shape_to_run(models[0].checkpoint))
        memory.check_fits(weights, caches, overhead, replace(free, free=free.free + weights), tokens)


def kv_ratios(results: Sequence[Result], models: Sequence[LoadedModel]) -> list[KVRatio]:
    """Return the speed of every further format over the first one's, with 95 % intervals."""
    entries = {(entry.model, _test(entry)): entry for entry in results if entry.engine == "headrace"}
    rows = []
    for model in models[1:]:
        for entry in results:
            first = entries.get((models[0].name, _test(entry)))
            if entry.engine != "headrace" or entry.model != model.name or first is None:
                continue
            rows.append(KVRatio(entry.test, entry.depth, model.name, models[0].name, *paired_ratio(entry, first)))
    return rows


def _test(entry: Result) -> tuple[str, int, int]:
    return entry.test, entry.depth, entry.batch
