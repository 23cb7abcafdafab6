"""Another cache layout behind the same protocols gives the same tokens: neither engine nor layers know which it is."""

from itertools import accumulate
from pathlib import Path
from typing import cast

import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.ops import Ops
from headrace.runtime.sampling.params import SamplingParams
from tests.support.block_cache import BlockBackend, WithBlocks
from tests.support.kernels import KERNELS, name_of
from tests.support.tiny import load_decoder, quantize_model, write_model
from tests.support.watched import split

PROMPT = [5, 17, 3, 88, 42, 9, 61, 30, 2, 77, 14, 50, 50, 8]
VARIANTS = ["llama", "qwen3", "gemma3", "llama-layer-types"]  # fused whole, and layer by layer; with windows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain and quantized, so that the kernels' prepared weights are among them."""
    root = tmp_path_factory.mktemp("models")
    plain = {name: write_model(root / name, name) for name in VARIANTS}
    return plain | {"llama-quantized": quantize_model(plain["llama"], root / "quantized")}


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize("variant", [*VARIANTS, "llama-quantized"])
def test_all_backends_give_the_same_conversation(models: dict[str, Path], variant: str, ops: Ops) -> None:
    """Prefill, decode with a step built ahead, a second turn on the kept cache, and one that takes some of it back."""
    network = load_decoder(models[variant], ops)
    blocks = WithBlocks(network)
    assert conversation(blocks) == conversation(network)
    assert len(blocks.caches) == 1
    assert blocks.caches[0].table != sorted(blocks.caches[0].table)


def conversation(network: Decoder | WithBlocks) -> list[list[int]]:
    engine = Engine(cast(Decoder, network), context_limit=128, keep_prefix=True)
    first = _say(engine, Request(PROMPT, max_tokens=12))
    second = _say(engine, Request([*PROMPT, *first, 4, 5, 6], max_tokens=9, sampling=SamplingParams(1.0, seed=7)))
    regenerated = _say(engine, Request([*PROMPT, *first, 4, 11], max_tokens=9, stop_ids=frozenset(second[-2:])))
    return [first, second, regenerated]


def _say(engine: Engine, request: Request) -> list[int]:
    events = list(engine.generate(request))
    records = [event.record for event in events if isinstance(event, Step)]
    assert [record.context for record in records] == [
        len(request.prompt) - 1 + said for said in accumulate(record.tokens for record in records)
    ]
    assert all(record.kv_used_bytes <= record.kv_allocated_bytes for record in records)
    return split(events)[0]


def test_both_backends_implement_the_kv_protocols(network: Decoder) -> None:
    """For the type checker: backend, caches and passes."""
    for kv in (network.kv_backend(KVOptions(8)), cast(KVBackend, BlockBackend(WithBlocks(network), KVOptions(8)))):
        cache: KVCache = kv.acquire(())
        passes: list[KVPass] = kv.make_passes([PassRow(cache, 2, "prefill")])
        assert [row.cache for one in passes for row in one.rows] == [cache]
