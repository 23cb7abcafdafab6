"""One quality run: load the networks, put the text through, build the document.

All networks take the text side by side in pieces, so only a piece's logits are in memory. A condition is a depth and a
phase. After Ctrl-C the finished conditions become the document.
"""

from collections.abc import Sequence

import mlx.core as mx

from headrace.app.bench.quality.divergence import Divergence, divergence
from headrace.app.bench.quality.forcing import Forced
from headrace.app.bench.quality.report import document
from headrace.app.bench.quality.text import DEPTHS, Passage, passages, read_text
from headrace.app.bench.quality.variants import Options, Variant
from headrace.app.output.document import Document
from headrace.app.output.progress import NumberedStages, drawn_progress
from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.network.kv_twin import with_kv
from headrace.models.registry.resolve import resolve
from headrace.runtime.errors import UsageError
from headrace.runtime.network import Network
from headrace.runtime.ops import Phase
from headrace.runtime.ops.kv_format import FORMATS, KVFormat, kv_format

PHASES: tuple[Phase, ...] = ("prefill", "decode")


def run(options: Options) -> Document:
    """Run it. Raises HeadraceError for models that do not load or compare, KeyboardInterrupt before any result."""
    asked_formats = None if options.kv is None else [kv_format(name) for name in dict.fromkeys(options.kv)]
    text = read_text(options.text)
    reference, *others = [_load(name, options.force) for name in (options.model, *dict.fromkeys(options.against))]
    for other in others:
        _check_vocabulary(reference, other)
    depths, asked = options.depths or DEPTHS, options.depths is not None
    room = min(model.context_limit for model in (reference, *others))
    found = passages(text, reference.tokenizer, depths, options.scored, room, asked=asked)
    notes: list[str] = []
    variants = _formats(reference.network, asked_formats, notes) if asked_formats or not options.against else []
    variants += [Variant(other.name, "weights", other.network) for other in others]
    interrupted = False
    try:
        with drawn_progress() as progress:
            measure(reference.network, variants, found, NumberedStages("passage", progress))
    except KeyboardInterrupt:
        interrupted = True
    if not variants[0].found:
        raise KeyboardInterrupt
    notes += [f"depth {depth:,} is left out: text or context is too short" for depth in depths if depth not in found]
    return document(reference, others, options, variants, notes, interrupted=interrupted)


def _formats(network: Network, asked: Sequence[KVFormat] | None, notes: list[str]) -> list[Variant]:
    """Return `network` with K/V in each format. asked None: all packed ones, with a note for each unsupported one.

    Raises UsageError if a requested format is unsupported, or all are.
    """
    if asked is not None:
        return [Variant(kind.name, "kv", with_kv(network, kind)) for kind in asked]
    variants: list[Variant] = []
    refusals: list[UsageError] = []
    for kind in FORMATS:
        if kind.packed:
            try:
                variants.append(Variant(kind.name, "kv", with_kv(network, kind)))
            except UsageError as refused:
                refusals.append(refused)
    if not variants:
        raise refusals[0]
    notes += [f"left out: {refused}" for refused in refusals]
    return variants


def measure(reference: Network, variants: Sequence[Variant], found: dict[int, Passage], stages: NumberedStages) -> None:
    """Put every passage through all networks in every phase; a variant's `found` holds the finished conditions."""
    limit = max(len(passage.context) + len(passage.fed) for passage in found.values())
    networks = [reference, *(variant.network for variant in variants)]
    forced = [Forced(network, limit, stages.tick) for network in networks]
    for number, (depth, passage) in enumerate(found.items()):
        for at, phase in enumerate(PHASES, start=len(PHASES) * number):
            stages.begin(at + 1, len(PHASES) * len(found), f"{phase} at depth {depth:,}")
            if phase == PHASES[0]:
                for one in forced:
                    one.begin(passage.context)
            done = [Divergence() for _ in variants]
            scored = 0
            for logits, *others in zip(*(one.score(passage.fed, phase) for one in forced), strict=True):
                targets = mx.array(passage.targets[scored : scored + logits.shape[0]])
                scored += logits.shape[0]
                for sums, other in zip(done, others, strict=True):
                    sums += divergence(logits, other, targets)
            for variant, sums in zip(variants, done, strict=True):
                variant.found[depth, phase] = sums
    for one in forced:
        one.end()


def _load(name: str | None, force: bool) -> LoadedModel:
    with drawn_progress() as progress:
        resolved = resolve(name, progress=progress)
    return load_resolved(resolved, force=force)


def _check_vocabulary(reference: LoadedModel, other: LoadedModel) -> None:
    """Raise UsageError unless both tokenizers have the same vocabulary."""
    sizes = [model.network.vocab_size for model in (reference, other)]
    if sizes[0] != sizes[1] or not reference.tokenizer.same_vocabulary(other.tokenizer):
        raise UsageError(
            f"{other.name}: its vocabulary differs from that of {reference.name}",
            "--against takes the same model in other quantizations",
        )
