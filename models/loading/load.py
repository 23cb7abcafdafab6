"""Loading a model directory: network, tokenizer, context limit and generation defaults.

Headers are checked first, then memory; only then are weights read.

Guard: tests/models/loading/test_load.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import mlx.core as mx
from msgspec import Struct, field
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig
from headrace.models.architectures.families import architecture_named, architecture_of
from headrace.models.checkpoint.adapter import Adapter
from headrace.models.checkpoint.quantization import has_groups_of_16
from headrace.models.checkpoint.safetensors import Checkpoint, open_checkpoint
from headrace.models.checkpoint.shard_header import stored_dtype
from headrace.models.checkpoint.text_part import text_part
from headrace.models.checkpoint.validation import convert_read_errors, report_store_damage
from headrace.models.cost.costs import loaded_weight_bytes, shape_to_run, working_memory
from headrace.models.cost.step_shape import StepShape
from headrace.models.loading.decoder_choice import NetworkKind, context_length, own_decoder
from headrace.models.loading.recommended import generation_defaults, recommended_sampling
from headrace.models.loading.sized import Sized
from headrace.models.network.activations import with_activations
from headrace.models.network.decoder_costs import kv_layers
from headrace.models.network.dtypes import compute_dtype
from headrace.models.network.make_decoder import stored_kv
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.resolve import ResolvedModel
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime import ops
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.machine import memory
from headrace.runtime.machine.background import report_if_slow, run_in_background
from headrace.runtime.machine.hardware import limit_command_buffers
from headrace.runtime.machine.out_of_memory import memory_errors
from headrace.runtime.metrics.cost import LayerKV, held_bytes, longest_context
from headrace.runtime.network import Network
from headrace.runtime.ops.kv_format import FORMATS, KVFormat

if TYPE_CHECKING:
    from headrace.models.loading.rank_part import Rank
    from headrace.models.network.decoder import Decoder
    from headrace.models.network.mtp import HeadTensors

KVChoice = KVFormat | Literal["auto"] | None
"""K/V storage format. "auto": unquantized if the context fits, otherwise the best format in which it fits.
None: unquantized."""
ActivationsChoice = int | Literal["auto"]
"""Bits of prompts' activations, 16 or 8. "auto": 8 if they are faster and the measured divergence is small."""
LEAST_CONTEXT = 512  # tokens; a shorter context has to be asked for
_SLOW_S = 1.0  # that weights or a tokenizer take before the first report
_EVERY_S = 0.25  # between two reports


class LoadedModel(Struct, frozen=True):
    """A model ready to run on the thread that loaded it.

    name: for people.
    kind: of the decoder that runs it.
    context_limit: tokens for which it was loaded.
    generation_defaults: recommended sampling, as generation_config.json has it.
    notes: messages for the user about the loaded weights.
    kv: K/V storage format; None: mlx-lm's default.
    ranks: a line per rank for the user, if several machines share it.
    """

    name: str
    checkpoint: Checkpoint
    network: Network
    kind: NetworkKind
    tokenizer: Tokenizer
    context_limit: int
    generation_defaults: dict[str, object]
    notes: list[str] = field(default_factory=list)
    kv: KVFormat | None = None
    ranks: tuple[str, ...] = ()

    @property
    def activations(self) -> int:
        """Bits of the rounded activations of prompts, 16 or 8."""
        return self.network.activations


class LoadOptions(TypedDict, total=False):
    """Options of `load_model`, for functions that pass them on."""

    context: int | None
    kv: KVChoice
    activations: ActivationsChoice
    force: bool
    progress: Progress


def load_resolved(
    resolved: ResolvedModel, *, rank: "Rank | None" = None, **options: Unpack[LoadOptions]
) -> LoadedModel:
    """Call `load_model` for a resolved model; an error names a damaged store entry and how to replace it.

    The catalog recommends sampling if the model's files do not.
    """
    path = resolved.path
    name = resolved.name
    with report_store_damage(resolved.stored_as, path):
        loaded = load_model(path, name=name, rank=rank, adapter=resolved.adapter, **options)
        return replace(loaded, generation_defaults=recommended_sampling(resolved, loaded.generation_defaults))


def load_model(
    directory: Path,
    *,
    name: str,
    context: int | None = None,
    kv: KVChoice = None,
    activations: ActivationsChoice = 16,
    force: bool = False,
    progress: Progress = silent,
    rank: "Rank | None" = None,
    adapter: Adapter | None = None,
) -> LoadedModel:
    """Load the model in `directory` for at most `context` tokens (None: the model's maximum that fits in memory).

    Raises CheckpointError for broken files, UnsupportedModelError for unknown architectures and NotEnoughMemoryError
    if weights and K/V do not fit (unless `force`). Raises UsageError for a context beyond the model's maximum (unless
    `force`), and for unsupported K/V formats, widths of activations and divisions.
    rank: load this rank's part of the model.
    adapter: low-rank changes of the weights.
    progress: called while weights and tokenizer are read, if that takes long, and while "auto" activations are
        measured, once for each model.
    """
    checkpoint = open_checkpoint(directory)
    config = own_decoder(checkpoint)
    longest = context_length(checkpoint)
    if context is not None and context > longest and not force:
        raise UsageError(
            f"a context of {context} tokens is too long; the maximum of {name} is {longest}",
            "--force goes beyond it; answers may degrade",
        )
    if adapter is not None:
        checkpoint = _adapted(checkpoint, adapter, name, rank)

    # The K/V format, and the context that fits into memory.
    fitted = fitting_network(checkpoint, config, kv, context, rank, force=force)
    limit = fitted.context

    # Weights and tokenizer take megabytes from disk, and release the interpreter lock: they are read together.
    with run_in_background(lambda: _tokenizer(checkpoint.path)) as read_tokenizer:
        with _weights_reported(progress, fitted.sized.weights):
            network = read_network(fitted.sized)
        with _reported(lambda: progress("loading the tokenizer", 0, None)):
            tokenizer = read_tokenizer()

    note = None
    if activations != "auto":
        network = with_activations(network, activations)
    elif rank is not None:
        note = "activations stay in 16 bits: several machines share the model"
    else:
        from headrace.models.loading.activation_choice import choose_activations  # late: used by "auto" alone

        with memory_errors(fitted.sized.weights):
            network, note = choose_activations(network, tokenizer, checkpoint, longest, progress)

    notes = _notes(name, checkpoint, native=config is not None and ops.select() is ops.native)
    if kv == "auto":
        notes += _kv_note(fitted.kv, context or longest, limit)
    if note is not None:
        notes.append(note)
    return LoadedModel(
        name=name,
        checkpoint=checkpoint,
        network=network,
        kind="mlx-lm" if config is None else "headrace",
        tokenizer=tokenizer,
        context_limit=limit,
        generation_defaults=generation_defaults(checkpoint.path),
        notes=notes,
        kv=network.kv_format,
    )


def _weights_reported(progress: Progress, total: int) -> AbstractContextManager[None]:
    """Return a context for reading weights, of `total` bytes, that reports how many are in memory."""
    before = mx.get_active_memory()  # of other models
    done = 0

    def report() -> None:
        nonlocal done
        # Converting takes memory besides that of the weights, and frees it.
        done = max(done, min(mx.get_active_memory() - before, total))
        progress("loading weights", done, total)

    return _reported(report)


def _reported(report: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context for a part of loading that calls `report` regularly if the part takes long."""
    return report_if_slow(lambda _seconds: report(), slow_s=_SLOW_S, every_s=_EVERY_S)


def _adapted(checkpoint: Checkpoint, adapter: Adapter, name: str, rank: "Rank | None") -> Checkpoint:
    """Return a checkpoint with an adapter. Raises UnsupportedModelError if several machines share the model."""
    if rank is not None:
        raise UnsupportedModelError(
            f"{name} cannot have an adapter: headrace applies it on one machine",
            "merge the adapter into its base, and load the result",
        )
    return replace(checkpoint, adapter=adapter)


def _notes(name: str, checkpoint: Checkpoint, *, native: bool) -> list[str]:
    """Return notes on converted, requantized and ignored weights. native: the model runs on the native kernels."""
    notes: list[str] = []
    if checkpoint.foreign is not None:
        notes.append(f"{name} is {checkpoint.foreign.describe()}")
    changed = [row for row in checkpoint.inexact if str(row.get("became")).startswith("affine")]
    if changed:
        kinds = " and ".join(sorted({str(row.get("type")) for row in changed}))
        notes.append(f"{name} has {len(changed)} tensors from {kinds} of its GGUF file, requantized to 8 bits")
    if has_groups_of_16(checkpoint.quantization) and not native:
        notes.append(f"{name} has weights in groups of 16, dequantized exactly and requantized to 8 bits")
    if _lacks_corrections(checkpoint):
        notes.append(f"{name} lacks its routers' corrections, which its conversion dropped: other experts are chosen")
    ignored = text_part(checkpoint).describe_ignored()
    if ignored is not None:
        notes.append(f"{name}: {ignored}")
    return notes


def _lacks_corrections(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has lost the corrections of its routers, as in conversions with mlx-lm."""
    loses = architecture_of(checkpoint.config).loses_corrections
    return loses and not any(name.endswith(".e_score_correction_bias") for name in checkpoint.tensors)


def _kv_note(chosen: KVFormat | None, wanted: int, limit: int) -> list[str]:
    """Return a note if "auto" chose quantized K/V."""
    if chosen is None or not chosen.packed:
        return []
    note = f"K/V are stored as {chosen.name}, since {wanted:,} tokens do not fit as {FORMATS[0].name}"
    if limit != wanted:
        note = f"{note}; as {chosen.name} {limit:,} do"
    return [note]


def _tokenizer(directory: Path) -> Tokenizer:
    """Load a model's tokenizer, and compile its chat template."""
    tokenizer = Tokenizer.load(directory)
    if tokenizer.chat_template is not None:
        tokenizer.chat_template.compile()
    return tokenizer


class Fitted(Struct, frozen=True):
    """A network as it fits into memory, before its weights are read."""

    sized: Sized
    kv: KVFormat | None  # its K/V format; None: mlx-lm's default
    context: int  # tokens


def fitting_network(
    checkpoint: Checkpoint,
    config: DecoderConfig | None,
    kv: KVChoice,
    context: int | None,
    rank: "Rank | None",
    *,
    force: bool,
) -> Fitted:
    """Return the network of a checkpoint, or of one rank, for the K/V format and the context that fit into memory.

    config: of headrace's own decoder; None for mlx-lm's classes. Others, and errors: see `load_model`.
    """
    wanted = context or context_length(checkpoint)
    shape = shape_to_run(checkpoint, config)
    limit_command_buffers(shape.layers)  # before the memory check has MLX make its device
    working = working_memory(shape)
    # The K/V format first, which "auto" chooses for `wanted` tokens; then the context, which may be shorter.
    sized_for = partial(sized_network, checkpoint, config, shape, rank)  # called with a K/V format
    kv_format, sized = choose_kv_format(sized_for, kv, wanted, working, rank)
    if force:
        return Fitted(sized, kv_format, wanted)
    fitting = _context_that_fits(sized.weights, sized.kv, working, wanted, asked=context is not None)
    return Fitted(sized, kv_format, fitting)


def read_network(sized: Sized) -> Network:
    """Read the weights of a network. Raises CheckpointError and NotEnoughMemoryError."""
    with memory_errors(sized.weights), convert_read_errors(), memory.reading_weights():
        network = sized.make()
        mx.eval(network.arrays)
        mx.synchronize()
    return network


def sized_network(
    checkpoint: Checkpoint,
    config: DecoderConfig | None,
    shape: StepShape,
    rank: "Rank | None",
    wanted: KVFormat | None,
) -> Sized:
    """Return a checkpoint's network without reading weights: a rank's part, mlx-lm's class, or headrace's decoder.

    config: of headrace's own decoder; None for mlx-lm's classes. wanted: K/V format. Others: see `load_model`.
    """
    chosen = ops.select()
    part = text_part(checkpoint)
    dtype = compute_dtype(mx.default_device().type, stored_dtype(part.tensors), checkpoint.config)
    if rank is not None:
        return rank.sized(checkpoint, config, chosen, dtype, wanted)
    if config is None:
        return _sized_class(checkpoint, wanted, chosen)
    return _sized_decoder(checkpoint, config, shape, dtype, stored_kv(config, chosen, dtype, wanted))


def _sized_decoder(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    shape: StepShape,
    dtype: mx.Dtype,
    kv: KVFormat,
) -> Sized:
    """Return headrace's own decoder, perhaps with a head."""
    weights = loaded_weight_bytes(checkpoint, shape)
    if checkpoint.adapter is not None:
        weights += checkpoint.adapter.nbytes
    layers = kv_layers(config, kv)
    head = None
    if architecture_named(config.architecture).head is not None:
        head = _head(checkpoint)
    if head is None:
        return Sized(lambda: _decoder(checkpoint, config, dtype, kv), weights, layers)

    def with_head() -> Network:
        from headrace.models.network.head_decoder import add_own_head

        return add_own_head(_decoder(checkpoint, config, dtype, kv), head)

    return Sized(with_head, weights + head.nbytes, layers)


def _sized_class(checkpoint: Checkpoint, wanted: KVFormat | None, chosen: ops.Ops) -> Sized:
    """Return the network of one of mlx-lm's classes, perhaps with a head. See `sized_network`.

    The class is instantiated for its sizes; its arrays stay unevaluated.
    """
    from headrace.models.mlx_lm.network import MlxLmNetwork, add_head

    device = mx.default_device().type
    kernels: ops.Ops | None = chosen
    if chosen is ops.reference:  # operations of MLX itself, as the class has them: its layers are not exchanged
        kernels = None
    network = MlxLmNetwork(checkpoint, device=device, kv=wanted, kernels=kernels)
    weights = sum(array.nbytes for array in network.arrays)
    head = _head(checkpoint)
    if head is None:
        return Sized(network.use_kernels, weights, network.cost.kv)

    def with_head() -> Network:
        return add_head(network.use_kernels(), head, device, kernels)

    return Sized(with_head, weights + head.nbytes, network.cost.kv)


def _head(checkpoint: Checkpoint) -> "HeadTensors | None":
    """Return the tensors of a checkpoint's multi-token prediction head; None if it has none."""
    from headrace.models.network.mtp import head_tensors

    return head_tensors(checkpoint)


def _decoder(checkpoint: Checkpoint, config: DecoderConfig, dtype: mx.Dtype, kv: KVFormat) -> "Decoder":
    """Return headrace's own decoder, with its weights."""
    from headrace.models.network.make_decoder import make_decoder
    from headrace.models.network.parameters import Parameters

    kernels = ops.select()
    together = kernels is ops.native and config.plain and not checkpoint.gguf  # a GGUF's are converted one by one
    with ops.native.read_together() if together else nullcontext():
        return make_decoder(config, Parameters(checkpoint, kernels, dtype), kv)


def choose_kv_format(
    sized: Callable[[KVFormat | None], Sized], kv: KVChoice, limit: int, working: int, rank: "Rank | None"
) -> tuple[KVFormat | None, Sized]:
    """Return the K/V format, for "auto" the best in which `limit` tokens fit on every rank, and its network.

    sized: returns the network with a format. working: bytes beside weights and K/V.
    """
    if kv != "auto":
        return kv, sized(kv)
    chosen, fitting = _best_fitting_format(sized, limit, working)
    common = chosen
    if rank is not None:  # FORMATS go from the largest to the smallest: all ranks use the smallest that one needs
        common = FORMATS[rank.largest(FORMATS.index(chosen))]
    if common is not chosen:
        fitting = sized(common)
    return common, fitting


def _best_fitting_format(sized: Callable[[KVFormat], Sized], wanted: int, working: int) -> tuple[KVFormat, Sized]:
    """Return the best format in which `wanted` tokens fit, or the smallest one, and its result of `sized`."""
    chosen = FORMATS[0]
    fitting = sized(FORMATS[0])
    for kind in FORMATS[1:]:
        if _num_fitting_tokens(fitting.weights, fitting.kv, working, wanted, memory.budget()) >= wanted:
            break
        with suppress(UsageError):  # the network may not support this format
            chosen, fitting = kind, sized(kind)  # both or neither
    return chosen, fitting


def _context_that_fits(weights: int, kv: Sequence[LayerKV], working: int, limit: int, *, asked: bool) -> int:
    """Return the context to run with: `limit`, reduced to the available memory if the user gave no context."""
    budget = memory.budget()
    room = _num_fitting_tokens(weights, kv, working, limit, budget)
    if not asked:
        limit = min(limit, max(room, LEAST_CONTEXT))
    memory.check_fits(weights, held_bytes(kv, limit), working, budget, limit, fitting=room)
    return limit


def _num_fitting_tokens(
    weights: int, kv: Sequence[LayerKV], working: int, limit: int, budget: memory.MemoryBudget | None
) -> int:
    """Return the number of tokens, at most `limit`, whose K/V fit next to the weights."""
    if budget is None:
        return limit
    return longest_context(kv, budget.usable - weights - working, limit)


def with_kv(network: Network, wanted: KVFormat) -> Network:
    """Return a network that shares every weight with `network`. Raises UsageError where its K/V cannot be `wanted`."""
    from headrace.models.network.decoder import Decoder  # late: a model of mlx-lm's needs none of it

    if isinstance(network, Decoder):
        return network.with_kv(stored_kv(network.config, network.ops, network.dtype, wanted))
    from headrace.models.mlx_lm.network import MlxLmNetwork  # half a second of imports

    assert isinstance(network, MlxLmNetwork)
    return network.with_kv(wanted)
