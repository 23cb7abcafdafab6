"""Facts about the machine, the loaded model and its turns."""

from dataclasses import dataclass, replace

from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import Summary


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Limits and names of the machine; None if unknown."""

    name: str = ""
    backend: str = ""
    memory_bytes: int | None = None
    measured_gb_s: float | None = None
    nominal_gb_s: float | None = None
    compute_flops: float | None = None  # FLOP/s, measured
    peak_flops: float | None = None  # dense half-precision, by the vendor


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The loaded model's sizes. `flops_per_token` leaves out attention, which grows with the context."""

    name: str = ""
    context_limit: int = 0
    weight_bytes: int = 0
    kv_format: str = ""  # K/V format; "" if unknown (mlx-lm's classes)
    kv_bytes_per_token: int = 0
    kv_bytes_at_limit: int = 0  # a full cache; windowed layers keep only their window
    flops_per_token: float | None = None
    cost: StepCost | None = None
    load_s: float = 0.0
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer in the history of turns."""

    number: int
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    ttft_s: float | None
    prefill_tokens_per_second: float | None
    tokens_per_second: float | None
    achieved_gb_s: float | None
    finish_reason: str

    @classmethod
    def of(cls, number: int, summary: Summary, reason: str) -> "Turn":
        return cls(
            number,
            summary.prompt_tokens,
            summary.reused_tokens,
            summary.completion_tokens,
            summary.ttft_s,
            summary.prefill_tokens_per_second,
            summary.decode_tokens_per_second,
            summary.achieved_gb_s,
            reason,
        )


@dataclass(frozen=True, slots=True)
class CacheFill:
    """Contents of the KV cache."""

    tokens: int = 0
    used_bytes: int = 0
    allocated_bytes: int = 0


def with_peaks(machine: MachineFacts, measured_gb_s: float, compute_flops: float | None) -> MachineFacts:
    """The same machine once it has been measured."""
    return replace(machine, measured_gb_s=measured_gb_s, compute_flops=compute_flops or machine.compute_flops)
