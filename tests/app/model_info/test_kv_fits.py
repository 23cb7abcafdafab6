"""Context that fits in each K/V format, and its short texts."""

import pytest

from headrace.app.config.load_options import KV_NAMES, PACKED, kv_choice
from headrace.app.model_info.kv_fits import fits_short, fits_text, kv_fits
from headrace.models.cost.costs import working_memory
from headrace.models.registry.catalog import find
from headrace.runtime import ops
from headrace.runtime.errors import UsageError
from headrace.runtime.ops.kv_format import FORMATS, Q8, kv_format

SHAPE = find("llama-3.2-1b").step_shape


@pytest.fixture
def _packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: True)


@pytest.mark.usefixtures("_packs")
def test_fewer_bytes_hold_more_context() -> None:
    tokens = 10_000
    room = SHAPE.resident_bytes + working_memory(SHAPE) + SHAPE.with_kv(Q8).cost.kv_bytes(tokens)
    found = kv_fits(SHAPE, room, packs=True)
    assert found is not None
    assert list(found) == [kind.name for kind in FORMATS]
    assert found["q8"] == tokens
    assert list(found.values()) == sorted(found.values())
    assert found["f16"] == pytest.approx(tokens * 17 / 32, abs=1)
    assert kv_fits(SHAPE, SHAPE.resident_bytes, packs=True) == dict.fromkeys(found, 0)
    assert kv_fits(SHAPE, 1 << 50, packs=True) == dict.fromkeys(found, SHAPE.context_length)
    assert kv_fits(SHAPE, None, packs=True) is None
    assert list(kv_fits(SHAPE, room, packs=False) or ()) == ["f16"]


def test_formats_that_the_operations_lack_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: False)
    assert list(kv_fits(SHAPE, 1 << 33, packs=True) or ()) == ["f16"]


def test_context_fits_are_described_in_words() -> None:
    assert fits_text(None, 8192) == ""
    assert fits_text({"f16": 0, "q8": 0}, 8192) == "nothing"
    assert fits_text({"f16": 8192, "q8": 8192}, 8192) == "all 8,192"
    assert fits_text({"f16": 4100, "q8": 7700, "q4": 8192}, 8192) == "f16 4,100 · q8 7,700 · q4 all"
    assert fits_text({"f16": 4100, "q8": 8192, "q4": 8192}, 8192) == "f16 4,100 · q8 all"


def test_context_fits_are_shown_in_a_column() -> None:
    assert fits_short(None, 8192) == fits_short({"f16": 0, "q8": 0}, 8192) == "-"
    assert fits_short({"f16": 8192, "q8": 8192}, 8192) == "all"
    assert fits_short({"f16": 900, "q8": 7700, "k8v4": 8192, "q4": 8192}, 8192) == "900/7k/all"
    assert fits_short({"f16": 4100, "q8": 7700}, 8192) == "4k/7k"
    assert fits_short({"f16": 4100}, 8192) == "4k"


def test_every_kv_format_name_is_read() -> None:
    assert [kv_choice(name) for name in KV_NAMES] == [*FORMATS, "auto"]
    assert {"q8", "k8v4", "q4"} == PACKED
    with pytest.raises(UsageError, match="q5"):
        kv_choice("q5")
    assert kv_format("f16") not in [kv_format(name) for name in PACKED]
