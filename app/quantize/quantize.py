"""One quantization: measure, choose, write, compare with the given weights, and install.

`quantize` reads top to bottom in these steps; `sensitivity.py` measures, `models/loading/bit_choice.py` chooses, and
`models/loading/mixed_quantization.py` writes. The directory is written under a temporary name and renamed when all
figures are known. The given weights and the quantized ones are never in memory together: the given ones leave logits
of the scored text.

Guards: tests/app/quantize/test_quantize.py and test_mixtures.py.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import mlx.core as mx
from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from headrace.app.bench.quality.figures import mean_figure
from headrace.app.bench.quality.text import SHIPPED, read_text
from headrace.app.output.progress import NumberedStages, drawn_progress
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.predict.prediction import TargetMachine
from headrace.app.predict.targets import targets_for
from headrace.app.quantize.budget import QuantizationBudget, bytes_in_memory, largest_that_holds, predicted_speed
from headrace.app.quantize.figures import FormatCount, PredictedSpeed, QuantizedHere
from headrace.app.quantize.sensitivity import Excerpt, Reference, Sensitivities, importances_of
from headrace.models.checkpoint.quantization import Groups
from headrace.models.checkpoint.safetensors import Checkpoint, open_checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.cost.step_shape import StepShape
from headrace.models.loading.bit_choice import PartFormat, choose
from headrace.models.loading.forcing import TeacherForcing
from headrace.models.loading.load import load_model, load_resolved
from headrace.models.loading.mixed_quantization import PlainModel, WeightGroup, plain_model, write_mixed
from headrace.models.network.decoder import Decoder
from headrace.models.registry.progress import Progress
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.models.registry.store import Store, write_model
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.config.typed import typed
from headrace.runtime.engine.request import check_ids
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.machine.memory import reading_weights, release_unused
from headrace.runtime.metrics.units import format_bytes
from headrace.runtime.network import Network

SCHEMA = "headrace-quantize/1"
MEASURED = 128  # tokens of the text's begin, which every part is measured with
SCORED = 512  # tokens of its end, which chose nothing
_DECODED = 33  # steps of the measured speed, the first of which is left out


class InterruptedQuantizationError(KeyboardInterrupt):
    """Ctrl-C while parts were measured; `str` says how many are stored."""


class QuantizeOptions(Struct, frozen=True):
    """Options of `headrace quantize`."""

    model: str
    budget: QuantizationBudget
    output: Path | None = None  # None: the model store
    name: str | None = None  # in the store; None: the model's and the bits
    chip: str | None = None  # None: this machine
    text: Path | None = None  # None: the built-in one
    quiet: bool = False


class Quantized(Struct, frozen=True):
    """A quantization."""

    model: str  # that was quantized
    path: Path  # of the copy
    name: str | None  # in the store; None: it stands elsewhere
    figures: QuantizedHere
    modules: Mapping[str, Groups]  # formats of matrices by name

    def document(self) -> dict[str, object]:
        """Return the JSON document, see docs/quantize.md."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "path": str(self.path),
            "name": self.name,
            **asdict(self.figures),
            "modules": {module: groups._asdict() for module, groups in self.modules.items()},
        }


class _Source(Struct, frozen=True):
    """The given model, with the facts of its headers."""

    model: ResolvedModel
    plain: PlainModel

    @property
    def checkpoint(self) -> Checkpoint:
        return self.plain.checkpoint

    @property
    def parts(self) -> Sequence[WeightGroup]:
        return self.plain.parts


def quantize(options: QuantizeOptions) -> Quantized:
    """Run it. Raises HeadraceError, and InterruptedQuantizationError while it measures."""
    _check_output(options)
    read_text(options.text)  # an error comes before the weights are read
    with drawn_progress(quiet=options.quiet) as progress:
        model = resolve(options.model, progress=progress)
        checkpoint = open_checkpoint(model.path)
        source = _Source(model, plain_model(checkpoint, model.name))
        [target, *_] = targets_for((options.chip,) if options.chip else (), None, others=False)
        _check_room(source, options.budget, target)
        name = options.name or _name_of(model, options.budget)
        if options.output is None and Store().has(name):
            raise UsageError(
                f"{name} is installed already", f"--as gives another name; `headrace rm {name}` removes it"
            )

        # Measure every part, then choose a format for each within the budget.
        with reading_weights():  # keeps less freed memory
            measurements = _measure(source, options, progress)
        release_unused()  # the given weights
        sensitivities = measurements.sensitivities
        parts_options = [sensitivities.options(part) for part in source.parts]
        chosen = _choose(source, parts_options, options.budget, target)
        formats = [(part, option.groups) for part, option in zip(source.parts, chosen, strict=True)]

        def build(directory: Path) -> dict[str, object]:
            write_mixed(source.plain, formats, measurements.importances, directory, progress)
            progress("measuring the result", 0, None)
            figures = replace(
                _figures(directory, source, measurements.reference, measurements.scored, target),
                budget=options.budget.describe(),
                predicted_kl=sum(option.kl for option in chosen),
                leaves_head=measurements.leaves_head,
                formats=_counted(formats),
            )
            return {
                "source": f"{model.origin}, quantized here",
                "licence": model.licence,
                "quantized_here": to_builtins(figures),
            }

        if options.output is None:
            stored = Store().install(name, build, progress=progress)
            path = stored.path
            stored_figures = stored.origin["quantized_here"]
        else:
            path = options.output
            stored_figures = write_model(path, build, progress)["quantized_here"]
    return Quantized(
        model=model.name,
        path=path,
        name=name if options.output is None else None,
        figures=typed(QuantizedHere, stored_figures),
        modules={module: groups for part, groups in formats for module in part.shapes},
    )


def _check_output(options: QuantizeOptions) -> None:
    if options.output is None:
        return
    if options.name is not None:
        raise UsageError("--as names a model of the store, and -o writes elsewhere", "give one of them")
    if os.path.lexists(options.output):
        raise UsageError(f"{options.output} exists already", "-o takes the name of a new folder")
    parent = options.output.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{parent} cannot be written")


def _name_of(model: ResolvedModel, budget: QuantizationBudget) -> str:
    stem = (model.stored_as or model.name).replace("/", "--")
    if budget.bits is not None:
        return f"{stem}-{budget.bits:g}bit"
    if budget.memory_bytes is not None:
        return f"{stem}-{budget.memory_bytes / 1e9:g}gb"
    return f"{stem}-{budget.tokens_per_second:g}tps"


def _check_room(source: _Source, budget: QuantizationBudget, target: TargetMachine) -> None:
    """Raise UsageError if the smallest result is larger than the budget, or slower than asked for."""
    smallest = [min(part.nbytes(groups) for groups in part.formats) for part in source.parts]
    if budget.tokens_per_second is not None:
        fastest = _speed_with(source, shape_of_checkpoint(source.checkpoint), target, smallest)
        if fastest < budget.tokens_per_second:
            raise UsageError(
                f"{source.model.name} reaches {fastest:.1f} tok/s at most on {target.name}, in 2 bits",
                "ask for less, or take a smaller model",
            )
    room = _room(source, budget, target)
    least = source.plain.other_bytes + sum(smallest)
    if room is not None and room < least:
        bits = least * 8 / source.plain.weights
        raise UsageError(
            f"{source.model.name} takes {format_bytes(least)} ({bits:.2f} bits a weight) at least, and "
            f"{budget.describe()} leave {format_bytes(max(room, 0))}",
            "give a larger budget, or take a smaller model",
        )


def _room(source: _Source, budget: QuantizationBudget, target: TargetMachine) -> int | None:
    """Return the bytes of all weights that the budget allows; None for a speed."""
    if budget.bits is not None:
        return int(budget.bits * source.plain.weights / 8)
    if budget.memory_bytes is not None:
        return bytes_in_memory(shape_of_checkpoint(source.checkpoint), target, budget.memory_bytes)
    return None


class _Measurements(Struct, frozen=True):
    """Results that outlive the given weights."""

    reference: Reference  # of the scored text
    scored: Excerpt
    sensitivities: Sensitivities  # of all parts
    importances: Mapping[str, mx.array]  # of columns, by part
    leaves_head: bool  # the given model has a multi-token prediction head


def _measure(source: _Source, options: QuantizeOptions, progress: Progress) -> _Measurements:
    """Load the given weights and measure all parts that have not been."""
    loaded = load_resolved(source.model, context=SCORED, progress=progress)
    decoder = loaded.network
    if not isinstance(decoder, Decoder):
        raise UnsupportedModelError(
            f"{source.model.name}: headrace does not choose bits for its architecture",
            f"`headrace pull {source.model.name} --quantize 4` quantizes all matrices alike",
        )
    leaves_head = decoder.draft_head is not None
    decoder.draft_head = None  # MLX's form has none, and logits do not depend on it
    measured, scored = _excerpts(loaded.tokenizer, options.text)
    for excerpt in (measured, scored):
        check_ids([*excerpt.fed, *excerpt.targets], decoder.vocab_size, "the text")
    progress("reading the text", 0, None)
    sensitivities = Sensitivities(source.plain, measured)
    reference = Reference(decoder, scored)
    importances = importances_of(decoder, measured)
    try:
        if sensitivities.count(source.parts) < len(source.parts):
            stages = NumberedStages("part", progress)
            sensitivities.measure(decoder, importances, Reference(decoder, measured), source.parts, stages)
    except KeyboardInterrupt:
        done = sensitivities.count(source.parts)
        raise InterruptedQuantizationError(
            f"interrupted: {done} of {len(source.parts)} parts are measured and kept; the same command goes on"
        ) from None
    return _Measurements(reference, scored, sensitivities, importances, leaves_head)


def _excerpts(tokenizer: Tokenizer, text: Path | None) -> tuple[Excerpt, Excerpt]:
    """Return the begin of the text, for the sensitivities, and its end, which scores the result."""
    ids = tokenizer.encode(read_text(text))
    if len(ids) <= MEASURED + SCORED:
        file = (text or SHIPPED).name
        raise UsageError(
            f"{file} has {len(ids):,} tokens, and {MEASURED + SCORED + 1:,} are needed", "give a longer --text"
        )
    opening = tokenizer.encode_prompt("")  # BOS, or nothing
    fed = [*opening, *ids[:MEASURED]][:MEASURED]
    targets = [*fed[1:], ids[MEASURED - len(opening)]]
    return Excerpt(fed, targets), Excerpt(ids[-SCORED - 1 : -1], ids[-SCORED:])


def _choose(
    source: _Source, parts: Sequence[Sequence[PartFormat]], budget: QuantizationBudget, target: TargetMachine
) -> list[PartFormat]:
    """Return the format of each part. The smallest ones keep to the budget: see `_check_room`."""
    room = _room(source, budget, target)
    if room is not None:
        return choose(parts, room - source.plain.other_bytes)
    speed = budget.tokens_per_second
    assert speed is not None
    shape = shape_of_checkpoint(source.checkpoint)

    def predicted(room: int) -> float:
        return _speed_with(source, shape, target, [option.nbytes for option in choose(parts, room)])

    least = sum(min(option.nbytes for option in options) for options in parts)
    most_bytes = sum(max(option.nbytes for option in options) for options in parts)
    bytes_to_use = largest_that_holds(least, most_bytes, lambda room: predicted(room) >= speed)
    assert bytes_to_use is not None
    return choose(parts, bytes_to_use)


def _speed_with(source: _Source, shape: StepShape, target: TargetMachine, sizes: Sequence[int]) -> float:
    """Return predicted tok/s with parts of these bytes."""
    saved = Fraction(0)  # bytes of a step
    for part, nbytes in zip(source.parts, sizes, strict=True):
        saved += part.share * (source.plain.plain_bytes(part) - nbytes)
    tokens_per_second, _is_expected = predicted_speed(shape, target, shape.cost.weight_bytes - round(saved))
    return tokens_per_second


def _figures(
    directory: Path, source: _Source, scored: Reference, text: Excerpt, target: TargetMachine
) -> QuantizedHere:
    """Return size, speed and quality of the written checkpoint."""
    checkpoint = open_checkpoint(directory)
    shape = shape_of_checkpoint(checkpoint)
    network = load_model(directory, name=source.model.name, context=SCORED).network
    compared = scored.compare(network)
    tokens_per_second, expected = predicted_speed(shape, target, shape.cost.weight_bytes)
    context = min(DEFAULT_CONTEXT, shape.context_length - 1)
    return QuantizedHere(
        bits_per_weight=checkpoint.nbytes * 8 / source.plain.weights,
        weight_bytes=checkpoint.nbytes,
        source_weight_bytes=source.plain.text.nbytes,
        weight_bytes_per_step=shape.cost.weight_bytes,
        predicted=PredictedSpeed(target.name, context, tokens_per_second, bound=not expected),
        measured_tokens_per_second=_measured_speed(network, text),
        scored_tokens=len(compared.kl),
        kl=mean_figure([compared.kl]),
        top1_agreement=mean_figure([compared.agrees]),
    )


def _measured_speed(network: Network, text: Excerpt) -> float:
    """Return tok/s of decode steps near the beginning of a context, one after the other, logits included."""
    forced = TeacherForcing(network, _DECODED)
    forced.begin([])
    for _ in forced.score(text.fed[:1], "decode"):
        forced.seconds = 0.0  # leaves out the first step, which compiles
    for _ in forced.score(text.fed[1:_DECODED], "decode"):
        pass
    forced.end()
    return (_DECODED - 1) / forced.seconds


def _counted(formats: Sequence[tuple[WeightGroup, Groups]]) -> list[FormatCount]:
    """Return a row for each format, by bits: its parts and weights."""
    parts: Counter[Groups] = Counter()
    weights: Counter[Groups] = Counter()
    for part, groups in formats:
        parts[groups] += 1
        weights[groups] += part.weights
    return [FormatCount(*groups, parts=parts[groups], weights=weights[groups]) for groups in sorted(parts)]
