"""One quality run: load the networks, put the text through, build the document (docs/quality-json.md).

All networks take the text side by side in pieces, so only a piece's logits are in memory. A condition is a depth and a
phase. After Ctrl-C the finished conditions become the document. tests/bench compares other programs with the same
functions, which are public for that.

Guard: tests/app/bench/quality/test_quality_run.py.
"""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from headrace.app.bench.measure.document import device_facts, model_facts
from headrace.app.bench.measure.open_engines import use_threads
from headrace.app.bench.measure.records import Device, ModelEntry
from headrace.app.bench.measure.setup import EngineSetup
from headrace.app.bench.quality.figures import BLOCK, ComparedKind, QualityResult, quality_result
from headrace.app.bench.quality.text import DEPTHS, SCORED, SHIPPED, Passage, passages, read_text
from headrace.app.output.document import typed_command
from headrace.app.output.progress import NumberedStages, drawn_progress
from headrace.app.versions import versions
from headrace.models.loading.divergence import Divergence, divergence
from headrace.models.loading.forcing import Scores, TeacherForcing
from headrace.models.loading.load import LoadedModel, load_resolved, with_kv
from headrace.models.network.activations import with_activations
from headrace.models.registry.resolve import resolve
from headrace.runtime.engine.request import check_ids
from headrace.runtime.errors import UsageError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.network import Network
from headrace.runtime.ops import Phase
from headrace.runtime.ops.kv_format import FORMATS, kv_format

SCHEMA = "headrace-quality/1"
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Condition = tuple[int, Phase]
"""(depth, phase)"""


class QualityOptions(Struct, frozen=True):
    """Options of a run.

    model: the reference; None: the default model.
    kv: formats to compare with the default K/V; None: all packed ones, or none if `against` or `coarse` is set.
    against: models to compare with.
    coarse: compare 8-bit activations of prompts.
    depths: tokens in the cache; None means DEPTHS, as far as text and model go.
    scored: tokens whose predictions are compared at each depth.
    text: the file that is scored; None: the one that is installed with headrace.
    force: load a model that does not fit into memory.
    threads: None means headrace's choice.
    """

    model: str | None
    kv: Sequence[str] | None = None
    against: Sequence[str] = ()
    coarse: bool = False
    depths: Sequence[int] | None = None
    scored: int = SCORED
    text: Path | None = None
    force: bool = False
    threads: int | None = None


class Variant(Struct):
    """A format or model compared with the reference."""

    name: str
    kind: ComparedKind
    network: Network | None
    scores: Scores | None = None
    divergences: dict[Condition, Divergence] = field(default_factory=dict)
    speeds: dict[Condition, float] = field(default_factory=dict)
    """Scored tokens per second."""


class ScoredText(Struct, frozen=True):
    """The text whose tokens are scored, in a document: its file's name, and the digest of its content."""

    file: str
    sha256: str


class QualityDocument(Struct, frozen=True, kw_only=True):
    """The document of `headrace bench --quality`; docs/quality-json.md explains the keys."""

    schema: str = SCHEMA
    created: str
    command: str
    interrupted: bool
    device: Device
    reference: ModelEntry
    against: list[ModelEntry]
    text: ScoredText
    scored: int
    block: int = BLOCK
    versions: dict[str, str]
    results: list[QualityResult]
    notes: list[str]
    engines: list[EngineSetup] | UnsetType = UNSET
    """Other programs, if there are any."""


def run(options: QualityOptions) -> QualityDocument:
    """Compare the formats and models of the options with the reference.

    Raises HeadraceError for models that do not load or compare, KeyboardInterrupt before any result.
    """
    if options.threads is not None:
        use_threads(options.threads)
    formats = [kv_format(name) for name in dict.fromkeys(options.kv or ())]  # refused before models are loaded
    text = read_text(options.text)
    reference, *others = [load(name, options.force) for name in (options.model, *dict.fromkeys(options.against))]
    for other in others:
        _check_vocabulary(reference, other)
    notes: list[str] = []
    variants: list[Variant] = []
    if options.kv is not None:
        variants += [Variant(kind.name, "kv", with_kv(reference.network, kind)) for kind in formats]
    elif not options.against and not options.coarse:
        variants += _packed_formats(reference.network, notes)
    if options.coarse:
        variants.append(Variant("8-bit activations", "activations", with_activations(reference.network, 8)))
    variants += [Variant(other.name, "weights", other.network) for other in others]
    passages_by_depth = chosen_passages(text, options, [reference, *others], notes)
    interrupted = measure(reference.network, variants, passages_by_depth)
    return document(reference, others, options, variants, notes, interrupted=interrupted)


def chosen_passages(
    text: str, options: QualityOptions, models: Sequence[LoadedModel], notes: list[str]
) -> dict[int, Passage]:
    """Return the passages by depth that fit all models. Adds a note for each depth that does not fit."""
    depths = options.depths or DEPTHS
    room = min(model.context_limit for model in models)
    passages_by_depth = passages(
        text, models[0].tokenizer, depths, options.scored, room, asked=options.depths is not None
    )
    for model in models:
        for passage in passages_by_depth.values():
            check_ids([*passage.context, *passage.fed, *passage.targets], model.network.vocab_size, "the text")
    notes += [
        f"depth {depth:,} is left out: text or context is too short"
        for depth in depths
        if depth not in passages_by_depth
    ]
    return passages_by_depth


def _packed_formats(network: Network, notes: list[str]) -> list[Variant]:
    """Return `network` with K/V in each packed format, and add a note for each unsupported one.

    Raises UsageError if all are.
    """
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


def measure(reference: Network, variants: Sequence[Variant], passages_by_depth: dict[int, Passage]) -> bool:
    """Put every passage through all networks in every phase, with progress; return whether Ctrl-C ended it.

    A variant's `divergences` are those of the finished conditions. Raises KeyboardInterrupt before the first.
    """
    interrupted = False
    try:
        with drawn_progress() as progress:
            _measure(reference, variants, passages_by_depth, NumberedStages("passage", progress))
    except KeyboardInterrupt:
        interrupted = True
    if not variants[0].divergences:
        raise KeyboardInterrupt
    return interrupted


def _measure(
    reference: Network, variants: Sequence[Variant], passages_by_depth: dict[int, Passage], stages: NumberedStages
) -> None:
    """Score each passage in each phase, and add the condition's divergence and speed to each variant."""
    limit = max(len(passage.context) + len(passage.fed) for passage in passages_by_depth.values())
    forced: list[Scores] = [TeacherForcing(reference, limit, stages.tick)]
    forced += [variant.scores or TeacherForcing(_network_of(variant), limit, stages.tick) for variant in variants]
    for number, (depth, passage) in enumerate(passages_by_depth.items()):
        for index, phase in enumerate(PHASES, start=len(PHASES) * number):
            stages.begin(index + 1, len(PHASES) * len(passages_by_depth), f"{phase} at depth {depth:,}")
            if phase == PHASES[0]:  # `score` goes back to the end of this context for the next phase
                for forcing in forced:
                    forcing.begin(passage.context)
            # All networks score the passage in step, a piece of logits at a time.
            done = [Divergence() for _ in variants]
            before = [forcing.seconds for forcing in forced[1:]]
            scored = 0
            for logits, *others in zip(*(forcing.score(passage.fed, phase) for forcing in forced), strict=True):
                targets = mx.array(passage.targets[scored : scored + logits.shape[0]])
                scored += logits.shape[0]
                for sums, other in zip(done, others, strict=True):
                    sums += divergence(logits, other, targets)
            for variant, sums, forcing, began in zip(variants, done, forced[1:], before, strict=True):
                variant.divergences[depth, phase] = sums
                if forcing.seconds > began:  # else the clock is too coarse
                    variant.speeds[depth, phase] = scored / (forcing.seconds - began)
    for forcing in forced:
        forcing.end()


def _network_of(variant: Variant) -> Network:
    assert variant.network is not None, "a variant has a network or scores"
    return variant.network


def load(name: str | None, force: bool) -> LoadedModel:
    """Load a model, fetched if need be. force: also one that does not fit into memory."""
    with drawn_progress() as progress:
        resolved = resolve(name, progress=progress)
        return load_resolved(resolved, force=force, progress=progress)


def _check_vocabulary(reference: LoadedModel, other: LoadedModel) -> None:
    """Raise UsageError unless both tokenizers have the same vocabulary."""
    sizes = [model.network.vocab_size for model in (reference, other)]
    if sizes[0] != sizes[1] or not reference.tokenizer.same_vocabulary(other.tokenizer):
        raise UsageError(
            f"{other.name}: its vocabulary differs from that of {reference.name}",
            "--against takes the same model in other quantizations",
        )


def document(
    reference: LoadedModel,
    others: Sequence[LoadedModel],
    options: QualityOptions,
    variants: Sequence[Variant],
    notes: Sequence[str],
    *,
    interrupted: bool,
) -> QualityDocument:
    """Return the document.

    others: models that the reference was compared with.
    variants: with their divergences.
    notes: variants left out, and why.
    interrupted: Ctrl-C ended the measurement; some conditions are missing.
    """
    file = options.text or SHIPPED
    return QualityDocument(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=typed_command(),
        interrupted=interrupted,
        device=device_facts(machine(), None),
        reference=model_facts(reference),
        against=[model_facts(other) for other in others],
        text=ScoredText(file.name, hashlib.sha256(file.read_bytes()).hexdigest()),
        scored=options.scored,
        versions=versions(),
        results=[entry for variant in variants for entry in _entries(variant, reference)],
        notes=[*notes, *(note for model in (reference, *others) for note in model.notes)],
    )


def _entries(variant: Variant, reference: LoadedModel) -> list[QualityResult]:
    """Return a variant's entries: all conditions together, if there are several, then each by itself."""
    entries = []
    if len(variant.divergences) > 1:
        entries.append(_entry(variant, reference, list(variant.divergences.values())))
    for (depth, phase), condition in variant.divergences.items():
        entry = _entry(variant, reference, [condition])
        speed = variant.speeds.get((depth, phase))
        entries.append(replace(entry, depth=depth, phase=phase, tokens_per_second=speed))
    return entries


def _entry(variant: Variant, reference: LoadedModel, conditions: Sequence[Divergence]) -> QualityResult:
    entry = quality_result(variant.name, variant.kind, conditions)
    if variant.network is None:
        return entry
    cost = variant.network.cost
    whole = reference.network.cost.kv_bytes_per_token  # 0 if no layer attends
    return replace(
        entry,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        kv_bytes_ratio=cost.kv_bytes_per_token / whole if whole else 1.0,
        weight_bytes_per_step=cost.weight_bytes,
    )
