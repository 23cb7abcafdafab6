"""The engine's events as named JSON documents, without any text, and back: a server's report on its decode loop.

`/v1/telemetry` and the `headrace` objects of streams are written by `document`; `headrace top` and a chat with
--connect read them by `event_of`. Each case of one has its case in the other; tests/app/engine/test_telemetry.py sends
every event through both. The other side may be anybody's: `event_of` lets no number and no text through that the
screen could not take.
"""

from typing import Any, TypedDict, get_type_hints

from msgspec import to_builtins
from msgspec.structs import asdict

from headrace.app.engine.events import BatchStatus, Delta, Died, Done, Event, Failed, PeakMeasured, Prefill, Ready
from headrace.app.engine.model_card import ModelCard
from headrace.app.output.sanitise import safe_line
from headrace.models.text.events import TextChunk
from headrace.runtime.config.typed import typed
from headrace.runtime.engine.request import Finished, FinishReason, Step
from headrace.runtime.metrics.telemetry import StepRecord, Summary

# Bounds on documents of other machines.
_LARGEST = 1e18  # any number, such as bytes or FLOP/s
_LONGEST = 200  # characters of a text
_MOST_TOKENS = 4096  # of one step: draft tokens, or sequences


def document(event: Event) -> tuple[str, dict[str, object]] | None:
    """Return an event's name and document; None for events without figures."""
    match event:
        case Ready():
            return "model", _card(event.card)
        case Prefill():
            names = ("id", "done", "total", "reused", "waited_s", "tokenize_s")
            return "prefill", {name: getattr(event, name) for name in names}
        case Delta() if event.records:
            steps = [
                to_builtins(record) | {"achieved_bandwidth_gb_s": record.achieved_gb_s} for record in event.records
            ]
            return "steps", {"id": event.id, "ttft_s": event.ttft_s, "steps": steps}
        case Done():
            return "done", {"id": event.id, "reason": event.end.reason, "summary": event.end.summary.document()}
        case Failed(id=int()):
            return "failed", {"id": event.id}
        case BatchStatus():
            states = {str(answer): state for answer, state in event.states.items()}
            return "load", {**to_builtins(event), "states": states}
        case PeakMeasured():
            return "bandwidth", to_builtins(event)
        case Died():
            return "died", {}
    return None


def event_of(name: str, fields: dict[str, Any]) -> Event | None:
    """Return the event of a document; None for an unknown name.

    Raises ValueError for values of other types or out of range, and TypeError or KeyError for missing ones.
    """
    fields = _bounded(fields)
    match name:
        case "model":
            return Ready(_read_card(fields))
        case "prefill":
            return typed(Prefill, fields)
        case "steps":
            steps = typed(_StepsDocument, fields)
            if any(max(step.accepted, step.proposed, step.batch) > _MOST_TOKENS for step in steps["steps"]):
                raise ValueError(f"a step has more than {_MOST_TOKENS} tokens")
            parts = [textless(record) for record in steps["steps"]]
            return Delta(steps["id"], parts, steps["ttft_s"], has_steps=False)
        case "done":
            done = typed(_DoneDocument, fields)
            return Done(done["id"], Finished(done["reason"], done["summary"]))
        case "failed":
            return Failed(typed(int, fields["id"]), "", None)
        case "load":
            states = {int(answer): state for answer, state in typed(dict[str, object], fields["states"]).items()}
            read = _read(BatchStatus, {**fields, "states": states})
            return BatchStatus(**read | {"batches": tuple(read["batches"])})
        case "bandwidth":
            return PeakMeasured(**_read(PeakMeasured, fields))
        case "died":
            return Died("the engine stopped")
    return None


def count_of(value: object) -> int:
    """Return a count in a document of another program; 0 for anything else, and for a number out of range."""
    if type(value) is int and 0 <= value <= _LARGEST:
        return value
    return 0


def _bounded(value: Any) -> Any:
    """Return a value of parsed JSON with all texts as one short, safe line. Raises ValueError for unusable numbers."""
    match value:
        case str():
            return safe_line(value[:_LONGEST])
        case bool() | None:
            return value
        case int() | float():
            if not 0 <= value <= _LARGEST:  # nor NaN
                raise ValueError("a number is out of range")
            return value
        case list():
            return [_bounded(part) for part in value]
    return {key: _bounded(part) for key, part in value.items()}


class _StepsDocument(TypedDict):
    """The document of a `Delta`."""

    id: int
    ttft_s: float | None
    steps: list[StepRecord]


class _DoneDocument(TypedDict):
    """The document of a `Done`."""

    id: int
    reason: FinishReason
    summary: Summary


def _read(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a document that a class has, each of the type that it has there. Raises ValueError.

    `typed` cannot read the classes of `events` themselves: they import some types for type checkers alone.
    """
    from headrace.runtime.engine.sequence import State
    from headrace.runtime.machine.hardware import Machine
    from headrace.runtime.machine.memory import MemoryBudget
    from headrace.runtime.machine.peaks import Peak
    from headrace.runtime.metrics.cost import StepCost

    names = {kind.__name__: kind for kind in (Machine, MemoryBudget, Peak, StepCost)}
    types = get_type_hints(kind, localns={**names, "State": State, "Recommendation": object})
    return {name: typed(types[name], value) for name, value in fields.items() if name in types}


def textless(record: StepRecord) -> TextChunk:
    """Return a step that is known by its record alone."""
    return TextChunk("", Step((), record))


def _card(card: ModelCard) -> dict[str, object]:
    """Return a loaded model's figures; no path."""
    names = ("name", "kind", "context_limit", "weight_bytes", "thinks", "load_s", "spare_cpus", "kv", "compute_flops")
    machine = {name: value for name, value in asdict(card.machine).items() if name != "isa"}
    return {name: getattr(card, name) for name in names} | {
        "kernels": dict(card.kernels),
        "cost": to_builtins(card.cost),
        "machine": machine,
        "peak": to_builtins(card.peak) if card.peak else None,
    }


def _read_card(fields: dict[str, Any]) -> ModelCard:
    """Return the card of a document of `_card`. Facts that it leaves out are unknown here."""
    unknown: dict[str, object] = {
        "path": "",
        "origin": "",
        "licence": None,
        "generation_defaults": {},
        "budget": None,
        "active_memory_bytes": 0,
    }
    machine = {**fields["machine"], "isa": []}
    card = ModelCard(**_read(ModelCard, {**fields, **unknown, "machine": machine}))
    card.machine.__dict__.update(gpu_cores=None, chip=None)  # those of the other machine are not known here
    return card
