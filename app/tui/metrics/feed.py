"""Engine events into live metrics."""

from collections.abc import Iterable

from headrace.app.engine.events import (
    Abandoned,
    ContextFull,
    Delta,
    Died,
    Done,
    Event,
    Failed,
    LoadProgress,
    PeakMeasured,
    Prefill,
    PrefixCached,
    Ready,
)
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message
from headrace.app.tui.metrics.facts import CacheFill, MachineFacts, ModelFacts, Turn, with_peaks
from headrace.app.tui.metrics.live import LiveMetrics


def feed(metrics: LiveMetrics, events: Iterable[Event]) -> None:
    """Take in events, in order."""
    for event in events:
        if metrics.batch is not None and metrics.batch.has(event):
            metrics.handle_batch_event(event)
            if isinstance(event, Died):
                metrics.died()
        elif isinstance(event, Delta):
            metrics.texts += event.steps
            if records := event.records:
                metrics.stepped(records)
            if event.ttft_s is not None:
                metrics.first_text(event.ttft_s)
        elif isinstance(event, Prefill):
            if event.done == 0 or metrics.phase == "idle":
                metrics.submitted()
            metrics.prefilling(event)
            if event.reuse is not None:
                metrics.explained(event.reuse)
        elif isinstance(event, PrefixCached):
            fill = CacheFill(event.tokens, event.used_bytes, event.allocated_bytes, event.shared_blocks)
            metrics.prefix_cached(fill, event.reuse)
        elif isinstance(event, Done):
            metrics.finished(event.end)
        elif isinstance(event, LoadProgress):
            metrics.loading(event.stage, event.done / event.total if event.total else None)
        elif isinstance(event, Ready):
            metrics.ready(*facts(event.card))
        elif isinstance(event, PeakMeasured):
            metrics.machine = with_peaks(metrics.machine, event.peak.gb_s, event.compute_flops, event.memory_gb_s)
            metrics.version += 1
        elif isinstance(event, Failed) and event.id is None:
            metrics.load_failed()
        elif isinstance(event, ContextFull | Failed | Abandoned):
            metrics.ended_early()
        elif isinstance(event, Died):
            metrics.died()


def stored_turns(messages: Iterable[Message]) -> list[Turn]:
    """Return the turns of a branch's stored answers."""
    answers = [(message, message.metrics) for message in messages if message.metrics is not None]
    return [
        Turn.of(number, summary, message.finish_reason or "") for number, (message, summary) in enumerate(answers, 1)
    ]


def use_model(metrics: LiveMetrics, card: ModelCard, known: MachineFacts) -> None:
    """Start the metrics of a loaded model. known: facts about the machine, perhaps measured since it was loaded."""
    model, machine = facts(card)
    metrics.ready(model, machine if machine.measured_gb_s is not None else known)


def _coarse(card: ModelCard) -> str:
    """Return the bits of prompts' activations, if they are not 16."""
    return "" if card.activations == 16 else f", activations {card.activations}"


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
        kernels=" ".join(dict.fromkeys(card.kernels.values())) + _coarse(card),
    )
    nominal = machine.nominal_bandwidth
    return model, MachineFacts(
        name=machine.device_name,
        backend=machine.backend,
        memory_bytes=machine.memory_bytes,
        measured_gb_s=card.peak.gb_s if card.peak else None,
        nominal_gb_s=nominal / 1e9 if nominal else None,
        compute_flops=card.compute_flops,
        peak_flops=chip.fp16_flops if chip else None,
    )
