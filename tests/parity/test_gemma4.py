"""Gemma 4 in headrace's decoder: prefixes, batches, draft tokens and K/V formats with layers of two shapes, some of
which read the K/V of earlier ones."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import checkpoint_cost
from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prefill import feed
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.ops import BLOCK, Ops, native, reference
from headrace.runtime.ops.kv_format import K8V4, Q4, Q8, KVFormat
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of
from tests.support.mlx_lm_models import VOCAB, config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder, quantize_model
from tests.support.watched import split

pytestmark = pytest.mark.peer

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(150)]  # two blocks
STEPS = 8
needs_kernels = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")


@pytest.fixture(scope="module", params=["gemma4", "gemma4-mixture"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    return quantize_model(write_mlx_lm_model(root / "plain", config_of(request.param)), root / "4-bit")


@pytest.fixture(scope="module", params=KERNELS, ids=name_of)
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


def engine_of(network: Decoder, *, keep: bool = False) -> Engine:
    return Engine(network, context_limit=400, keep_prefix=keep)


def said(engine: Engine, prompt: list[int], speculate: str = "off") -> tuple[list[Any], int]:
    """Return the tokens with log probabilities of all others, and how many of the prompt's were cached."""
    request = Request(prompt, max_tokens=STEPS, speculate=speculate, logprobs=VOCAB)  # type: ignore[arg-type]
    events = list(engine.generate(request))
    _, end = split(events)
    return spoken(events), end.summary.reused_tokens


def spoken(events: list[Any]) -> list[Any]:
    steps = [event for event in events if isinstance(event, Step)]
    return [pair for step in steps for pair in zip(step.tokens, step.logprobs or (), strict=True)]


def tokens_of(pairs: list[Any]) -> list[int]:
    return [token for token, _ in pairs]


@pytest.mark.sampled
def test_turns_and_edits_prefill_new_tokens_only(directory: Path, ops: Ops) -> None:
    network = load_decoder(directory, ops)
    chat = engine_of(network, keep=True)
    first = tokens_of(said(engine_of(network), PROMPT)[0])
    assert tokens_of(said(chat, PROMPT)[0]) == first
    for prompt, least in (
        ([*PROMPT, *first, 3, 1, 4], len(PROMPT)),
        ([*PROMPT[:140], 8, 8, 8], BLOCK),
        ([9, *PROMPT[1:]], 0),
    ):
        tokens, reused = said(chat, prompt)
        assert reused >= least
        assert tokens_of(tokens) == tokens_of(said(engine_of(network), prompt)[0])


@needs_kernels
def test_bits_do_not_depend_on_batch_prefix_or_draft_tokens(directory: Path) -> None:
    """Alone, in a batch, behind a shared prefix and with draft tokens: the same log probabilities, bit for bit."""
    network = load_decoder(directory, native)
    prompts = [PROMPT, PROMPT[:40], [*PROMPT[:135], 4, 4], PROMPT[:40] * 3]
    alone = [said(engine_of(network), prompt)[0] for prompt in prompts]
    together = engine_of(network)
    running = [
        together.submit(Request(prompt, max_tokens=STEPS, speculate="off", logprobs=VOCAB)) for prompt in prompts
    ]
    events: dict[Any, list[Any]] = {sequence: [] for sequence in running}
    while together.has_work:
        for sequence, event in together.step():
            events[sequence].append(event)
    assert [spoken(events[sequence]) for sequence in running] == alone
    assert said(engine_of(network), prompts[3], "ngram")[0] == alone[3]


@needs_kernels
def test_a_conversation_continues_from_disk(directory: Path, tmp_path: Path) -> None:
    network = load_decoder(directory, native)
    engine = engine_of(network, keep=True)
    store = DiskStore(tmp_path, 1 << 30)
    history = [*PROMPT, *tokens_of(said(engine, PROMPT)[0])]
    engine.kv.store(history[:-1], store, lambda: False)
    again = engine_of(network, keep=True)
    again.kv.load([*history, 3, 1, 4], store)
    tokens, reused = said(again, [*history, 3, 1, 4])
    assert (tokens, reused) == (said(engine, [*history, 3, 1, 4])[0], len(history) - 1)


@pytest.mark.sampled
@pytest.mark.parametrize("kv", [Q8, K8V4, Q4], ids=lambda kv: kv.name)
def test_quantized_kv_is_close(directory: Path, ops: Ops, kv: KVFormat) -> None:
    def last(network: Decoder) -> mx.array:
        cache = new_cache(network, 256)
        cache.reserve(60)
        return network.logits(network.layers(network.embed(mx.array([PROMPT[:60]])), cache))

    usual, packed = (load_decoder(directory, ops, kv=form) for form in (None, ops.packed_format(kv, 32)))
    distance = mx.abs(last(usual) - last(packed)).mean() / mx.abs(last(usual)).mean()
    assert 0 < distance.item() < (0.02 if kv is Q8 else 0.3)
    assert packed.cost.kv_bytes_per_token == packed.kv_shape.bytes_per_token < usual.cost.kv_bytes_per_token


@needs_kernels
def test_a_prompt_skips_layers_after_the_last_that_appends(directory: Path) -> None:
    network = load_decoder(directory, native)
    run: list[slice] = []

    class Noting:
        """Wraps a pass, and notes the groups of layers that it runs."""

        def __init__(self, kv_pass: Any) -> None:
            self._pass = kv_pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pass, name)

        def run_fused(self, layers: slice, x: mx.array, node: Any) -> mx.array:
            run.append(layers)
            return self._pass.run_fused(layers, x, node)

    backend = network.kv_backend(KVOptions(256))
    cache: Any = backend.acquire(())
    kv_pass: Any = Noting(one_pass(backend, cache, 20, output=False))
    x = feed(network, kv_pass, mx.array(PROMPT[:20]))
    assert run == [slice(0, 3)]
    assert cache.pool.storage.newest is x  # the arrays of the pass wait for no more than this one
    assert x.shape[1] == 0


def test_the_cost_is_known_from_headers(directory: Path, ops: Ops) -> None:
    network = load_decoder(directory, ops)
    known = checkpoint_cost(open_checkpoint(directory))
    assert known is not None
    assert known.weight_flops == network.cost.weight_flops
    assert known.weight_bytes == pytest.approx(network.cost.weight_bytes, rel=0.1)  # routers and vectors are wider
    kept = [kind for kind in network.kv_shape.kinds if kind is not None]
    assert len(kept) == sum(layer.source is None for layer in network.config.layers)
    assert sum(layer.count for layer in network.cost.kv) == len(kept)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_nothing_promotes_half_precision(directory: Path, dtype: mx.Dtype) -> None:
    network = load_decoder(directory, reference, dtype)
    cache = new_cache(network, 256)
    for part in (PROMPT[:40], PROMPT[40:41]):
        cache.reserve(len(part))
        x = network.embed(mx.array([part]))
        hidden = network.layers(x, cache)
        cache.advance(len(part))
        assert {array.dtype for array in (x, hidden, network.logits(hidden), *cache.arrays)} == {dtype}
