"""A step taken apart: the parts are there, add up in kind, and leave the network and its cache as they were."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.app.bench.measure import profile as measured
from headrace.app.bench.measure.profile import PARTS, profile
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import Weight
from tests.support import mlx_lm_models
from tests.support.mlx_lm_models import write_mlx_lm_model
from tests.support.tiny import VARIANTS, load_decoder, write_model


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_is_profiled_by_part(variant: str, tmp_path: Path) -> None:
    decoder = load_decoder(write_model(tmp_path / "model", variant))

    def answer() -> list[int]:
        request = Request([5, 6, 7], max_tokens=8)
        events = Engine(decoder, context_limit=64).generate(request)
        return [token for event in events if isinstance(event, Step) for token in event.tokens]

    before = answer()
    found = profile(decoder, 20, rounds=2)
    assert tuple(found.parts_ms) == PARTS
    assert all(value > 0 for value in found.parts_ms.values())
    total = sum(found.parts_ms.values())
    assert found.closure == pytest.approx(total / found.synchronous_step_ms - 1)
    assert answer() == before


@pytest.mark.parametrize("variant", ["llama", "gemma3", "youtu"])
def test_every_matrix_is_in_the_weights_part(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[measured.RecordedCall]()
    record = measured._record

    def recorded(*arguments: Any) -> Any:
        found = record(*arguments)
        calls.extend(found[0])
        return found

    monkeypatch.setattr(measured, "_record", recorded)
    if variant in VARIANTS:
        directory = write_model(tmp_path / "model", variant)
    else:  # latent attention
        directory = write_mlx_lm_model(tmp_path / "model", mlx_lm_models.config_of(variant))
    decoder = load_decoder(directory)
    profile(decoder, 4, rounds=2)
    seen = [x for name, given in calls if measured._KINDS[name] == "weights" for x in given if isinstance(x, Weight)]
    layers = [weight for layer in decoder._layers for weight in layer.matrices]
    assert {id(weight) for weight in seen} == {id(weight) for weight in (*layers, decoder._head)}


def test_only_headraces_decoder_can_be_profiled() -> None:
    class Foreign:
        arrays: list[mx.array]

    with pytest.raises(UsageError, match="own decoder"):
        profile(Foreign(), 0)
