"""Events as documents without text, and back."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.app.engine.events import (
    BatchStatus,
    Delta,
    Died,
    Done,
    Event,
    Failed,
    LoadProgress,
    PeakMeasured,
    Prefill,
    Ready,
)
from headrace.app.engine.http_address import HTTPAddress
from headrace.app.engine.telemetry import document, event_of, textless
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import UsageError
from headrace.runtime.machine.peaks import Peak
from headrace.runtime.metrics.telemetry import PoolStats, StepParts
from tests.support.deltas import delta
from tests.support.scripted_engine import CARD, record
from tests.support.summaries import make_summary

SECRET = "a secret text"
PEAK = Peak(5e10, 4e10, 6e10, 9, 1 << 30, "reads", "2026-01-01T00:00:00Z")
TIMED = replace(record(1, 20), parts=StepParts(0.1, 0.2, 0.3, 0.4, 0.5))


def back(event: Event) -> Any:
    """Return an event after its way through JSON."""
    found = document(event)
    assert found is not None
    text = json.dumps(found[1])
    assert SECRET not in text
    return event_of(found[0], json.loads(text))


EVENTS = [
    Prefill(3, 5, 10, 2, 0.1, 0.2),
    Delta(3, [textless(record(0, 11)), textless(TIMED)], 0.5, has_steps=False),
    Done(3, Finished("stop", make_summary())),
    BatchStatus({3: "decode", 4: "waiting"}, 9, 1.5, (1, 2), 100, 200, 300, PoolStats(1, 2, 3, 4)),
    BatchStatus({}, 0, 1.5, (), 100, 200, 300, None),
    PeakMeasured(PEAK, 1e11, 40.0),
]


@pytest.mark.parametrize("event", EVENTS)
def test_events_are_read_as_they_were_written(event: Event) -> None:
    assert back(event) == event


def test_telemetry_has_no_texts() -> None:
    assert back(delta(3, SECRET, [record(0, 11)])) == Delta(3, [textless(record(0, 11))], has_steps=False)
    assert back(Done(3, Finished("stop", make_summary(), stop_string=SECRET))).end.stop_string is None
    assert back(Failed(3, SECRET, SECRET)) == Failed(3, "", None)
    assert isinstance(back(Died(SECRET)), Died)
    assert document(delta(3, SECRET)) is None
    assert document(LoadProgress(SECRET, 0, None)) is None


def test_a_model_card_is_sent_without_its_path() -> None:
    card = back(Ready(replace(CARD, path=SECRET, peak=PEAK))).card
    assert (card.name, card.cost, card.kv_bytes_per_token) == (CARD.name, CARD.cost, CARD.kv_bytes_per_token)
    assert (card.peak, card.path) == (PEAK, "")
    assert card.machine.device_name == CARD.machine.device_name
    assert card.machine.chip is None


def test_unknown_documents_are_ignored() -> None:
    assert event_of("weather", {"rain": True}) is None


WRONG = ("text", [], {}, True, -1.5)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all numbers, texts and empty values of a document."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items:
        yield path
    for key, part in items:
        yield from leaves(part, (*path, key))


def replaced(document: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a copy of a document with another value at a path."""
    copy = json.loads(json.dumps(document))
    part = copy
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return copy


def same_types(event: Any, sound: Any) -> bool:
    """Return whether the document of an event has numbers where that of a sound one has numbers, and so on."""
    if isinstance(sound, dict):
        return isinstance(event, dict) and all(same_types(event[key], sound[key]) for key in sound.keys() & event)
    if isinstance(sound, list):
        return isinstance(event, list) and all(same_types(part, sound[0]) for part in event if sound)
    if isinstance(sound, int | float) and not isinstance(sound, bool):
        return isinstance(event, int | float | None) and not isinstance(event, bool)
    return type(event) is type(sound) or event is None or sound is None


@pytest.mark.parametrize("event", [Ready(CARD), *EVENTS], ids=lambda event: type(event).__name__)
def test_values_of_other_types_are_refused(event: Event) -> None:
    """A server may send anything: no event has a text in place of a number, or the like."""
    found = document(event)
    assert found is not None
    name, sound = found
    sound = json.loads(json.dumps(sound))
    for path in leaves(sound):
        for value in WRONG:
            try:
                read = event_of(name, replaced(sound, path, value))
            except (ValueError, TypeError, KeyError):
                continue
            assert read is not None
            again = document(read)
            assert again is not None
            assert same_types(json.loads(json.dumps(again[1])), sound), (path, value)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 10**400, 2e18], ids=repr)
def test_numbers_that_no_screen_can_draw_are_refused(value: float) -> None:
    """A latency that is no number, or a number beyond a float, would end `headrace top`."""
    for event in (Ready(replace(CARD, peak=PEAK)), *EVENTS):
        found = document(event)
        assert found is not None
        name, sound = found
        for path in leaves(sound):
            with pytest.raises((ValueError, TypeError)):
                event_of(name, replaced(sound, path, value))


@pytest.mark.parametrize("field", ["accepted", "proposed", "batch"])
def test_a_step_with_a_billion_tokens_is_refused(field: str) -> None:
    """Latencies of tokens are lists, with an item for each."""
    found = document(EVENTS[1])
    assert found is not None
    with pytest.raises(ValueError, match="tokens"):
        event_of(found[0], replaced(found[1], ("steps", 1, field), 10**9))


def test_texts_of_a_server_are_one_short_safe_line() -> None:
    name, sound = document(Ready(CARD)) or ("", {})
    hostile = "mill\n\x1b]0;owned\x07\x9b2J\u202e" + "x" * 10**6
    for path in (("name",), ("machine", "device_name"), ("machine", "os")):
        read = event_of(name, replaced(sound, path, hostile))
        assert isinstance(read, Ready)
        text = read.card.name if path == ("name",) else getattr(read.card.machine, path[-1])
        assert text.startswith("mill ")
        assert text.isprintable()
        assert len(text) < 300


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://a:b:c"])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="URL"):
        HTTPAddress(url)
