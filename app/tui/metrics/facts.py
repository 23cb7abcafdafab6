"""Facts about the machine, the loaded model and its turns.

Frozen records that `LiveMetrics` has and the sections of the decode view read. They are made of a `ModelCard`
(`facts`), of stored answers (`stored_turns`) and of ended ones.

Guards: tests/tui/test_limits.py and test_charts.py.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import Summary


class MachineFacts(Struct, frozen=True):
    """Limits and names of the machine; None if unknown."""

    name: str = ""
    backend: str = ""  # "cpu", "metal" or "cuda"
    measured_gb_s: float | None = None  # peak bandwidth
    memory_gb_s: float | None = None  # the latest reading without other load, with which MBU compares
    nominal_gb_s: float | None = None  # bandwidth by the vendor
    compute_flops: float | None = None  # FLOP/s, measured
    peak_flops: float | None = None  # dense half-precision, by the vendor

    @property
    def flops_per_second(self) -> float | None:
        """The limit of arithmetic: measured, else the vendor's."""
        return self.compute_flops or self.peak_flops


class ModelFacts(Struct, frozen=True):
    """The loaded model's sizes; empty without one."""

    name: str = ""
    context_limit: int = 0  # tokens
    weight_bytes: int = 0  # that a step reads
    kv_format: str = ""  # K/V format; "" if unknown (mlx-lm's classes)
    kv_bytes_per_token: int = 0
    kv_bytes_at_limit: int = 0  # a full cache; windowed layers keep only their window
    cost: StepCost | None = None  # of a step
    load_s: float = 0.0
    kernels: str = ""  # in use, and their reason
    ranks: tuple[str, ...] = ()  # a line per rank, if several machines share the model


class TurnFigures(Struct, frozen=True):
    """One answer in the history of turns. Figures as in its `Summary`.

    number: from 1.
    reused_tokens: prompt tokens that were cached.
    finish_reason: as stored; of the answer in progress, its phase.
    busy: other programs slowed it down, so there is no MBU.
    """

    number: int
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    ttft_s: float | None
    tokens_per_second: float | None
    finish_reason: str
    mbu: float | None = None
    busy: bool = False

    @classmethod
    def of(cls, number: int, summary: Summary, reason: str) -> "TurnFigures":
        """Return the turn of an ended answer. reason: why it ended."""
        return cls(
            number=number,
            prompt_tokens=summary.prompt_tokens,
            reused_tokens=summary.reused_tokens,
            completion_tokens=summary.completion_tokens,
            ttft_s=summary.ttft_s,
            tokens_per_second=summary.decode_tokens_per_second,
            finish_reason=reason,
            mbu=summary.mbu,
            busy=summary.busy,
        )


class MeasuredPrefill(Struct, frozen=True):
    """FLOPs, bytes and seconds of a prefill; its tokens share one read of the weights."""

    flops: int
    nbytes: int
    seconds: float

    @classmethod
    def of(cls, cost: StepCost, reused: int, fed: int, seconds: float) -> "MeasuredPrefill":
        """Return the cost of `fed` tokens after `reused` ones from the cache, as if they were computed in one pass.

        Prefill skips the late weights, such as the output projection: no token is chosen. The K/V are read once for
        all queries, as far as the last one sees them; `kv_bytes_read` adds that token's own entry to those before it.
        Each chunk of a long prompt reads the weights again, so the bytes are the least that it takes.
        """
        read = cost.weight_bytes - cost.late_bytes + cost.kv_bytes_read(reused + fed - 1)
        return cls(cost.prompt_flops(reused, fed), read + cost.kv_bytes_written(fed), seconds)


class FirstToken(Struct, frozen=True):
    """Parts of a time to first token, in seconds.

    ttft_s: all of it.
    wait_s: for the model to load, or for other work of the engine.
    tokenize_s, prefill_s: of the prompt.
    step_s: of the first step, which feeds the prompt's last token.
    rest_s: cached K/V from disk, and delivery.
    """

    ttft_s: float
    wait_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    step_s: float = 0.0
    rest_s: float = 0.0

    @classmethod
    def of(cls, summary: Summary) -> "FirstToken | None":
        """Return the parts of an ended answer; None for one without text."""
        if summary.ttft_s is None:
            return None
        step_s = summary.first_step_s or 0.0
        known_s = summary.queue_s + summary.tokenize_s + summary.prefill_s + step_s
        return cls(
            summary.ttft_s,
            wait_s=summary.queue_s,
            tokenize_s=summary.tokenize_s,
            prefill_s=summary.prefill_s,
            step_s=step_s,
            rest_s=max(0.0, summary.ttft_s - known_s),
        )

    def parts(self) -> list[tuple[str, float]]:
        """Return (name, seconds), the longest first."""
        named = {
            "wait": self.wait_s,
            "tokenize": self.tokenize_s,
            "prefill": self.prefill_s,
            "first step": self.step_s,
            "rest": self.rest_s,
        }
        return sorted(named.items(), key=lambda part: -part[1])


class CacheFill(Struct, frozen=True):
    """Contents of the KV cache.

    tokens: its entries.
    used_bytes, allocated_bytes: of these, and of the cache with its free room.
    shared_blocks: see `PrefixCached`.
    """

    tokens: int = 0
    used_bytes: int = 0
    allocated_bytes: int = 0
    shared_blocks: int = 0


def with_peaks(
    machine: MachineFacts, measured_gb_s: float, compute_flops: float | None, memory_gb_s: float | None = None
) -> MachineFacts:
    """Return the same machine once it has been measured."""
    return replace(
        machine,
        measured_gb_s=measured_gb_s,
        compute_flops=compute_flops or machine.compute_flops,
        memory_gb_s=memory_gb_s or machine.memory_gb_s,
    )


def stored_turns(messages: Iterable[Message]) -> list[TurnFigures]:
    """Return the turns of a branch's stored answers."""
    answers = [(message, message.metrics) for message in messages if message.metrics is not None]
    return [
        TurnFigures.of(number, summary, message.finish_reason or "")
        for number, (message, summary) in enumerate(answers, 1)
    ]


def _coarse_activations(card: ModelCard) -> str:
    """Return the bits of prompts' activations, to append to the kernels; "" for the usual 16."""
    if card.activations == 16:
        return ""
    return f", activations {card.activations}"


def facts(card: ModelCard) -> tuple[ModelFacts, MachineFacts]:
    """Return a loaded model's facts and its machine's."""
    machine = card.machine
    chip = card.machine.chip
    model = ModelFacts(
        name=card.name,
        context_limit=card.context_limit,
        weight_bytes=card.cost.weight_bytes,
        kv_format=card.kv or "",
        kv_bytes_per_token=card.kv_bytes_per_token,
        kv_bytes_at_limit=card.cost.kv_bytes(card.context_limit),
        cost=card.cost,
        load_s=card.load_s,
        ranks=card.ranks,
        kernels=" ".join(dict.fromkeys(card.kernels.values())) + _coarse_activations(card),
    )
    nominal = machine.nominal_bandwidth
    return model, MachineFacts(
        name=machine.device_name,
        backend=machine.backend,
        measured_gb_s=card.peak.gb_s if card.peak else None,
        nominal_gb_s=nominal / 1e9 if nominal else None,
        compute_flops=card.compute_flops,
        peak_flops=chip.fp16_flops if chip else None,
    )
