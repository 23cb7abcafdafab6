"""The real default model, float32 on the CPU: our greedy decode against mlx-lm's own class on the same weights.

Up to 128 tokens on every prompt against what mlx-lm answered when it was recorded; and mlx-lm itself, here and now,
on one.
Where the native kernels run, the stock operations, which are thirty times slower there, do the first 8 of one prompt.
There it need not generate as well: one forward pass over prompt and answer gives its choice at every position, and if
each equals our token, its greedy answer is ours.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.request import Request
from headrace.runtime.ops import Ops, reference
from headrace.runtime.ops.kv_format import FLOAT32
from tests.support.alone import new_cache
from tests.support.kernels import FAST, KERNELS, name_of
from tests.support.parity_prompts import PROMPTS
from tests.support.recorded_answers import read
from tests.support.tiny import load_decoder
from tests.support.watched import WatchedNetwork, answer, committed_rows

pytestmark = [pytest.mark.real, pytest.mark.peer]

RECORDED = read(Path(__file__).with_name("mlx_lm_greedy.json"))
STEPS = 128
LIVE = "prose"
LIVE_STEPS = 8
EXACT_STEPS = 24
LONG = {LIVE, "long"}  # prompts with answers of full length; the others end after a third
CASES = [
    pytest.param(ops, name, id=f"{ops.name}-{name}")
    for ops in KERNELS
    for name in PROMPTS
    if ops is not reference or len(KERNELS) == 1 or name == LIVE
]


def steps_of(ops: Ops, name: str) -> int:
    """Return the number of tokens of these operations' answers: fewer where a token takes long."""
    if len(KERNELS) == 1:
        return STEPS
    whole = {"native": STEPS, "native-exact": EXACT_STEPS}.get(ops.name, LIVE_STEPS)
    return whole if name in LONG else whole // 3


def limit(ops: Ops) -> float:
    """Relative difference of logits that rounding explains: 3e-6 was measured with K/V in float32, 1e-3 in float16."""
    return 2e-5 if ops.kv_format(mx.float32) == FLOAT32 else 2e-3


@pytest.fixture(scope="module")
def network_of(default_model: Path) -> Callable[[Ops], Decoder]:
    """Load the model on the operations that a test asks for."""
    loaded: dict[str, Decoder] = {}

    def load(ops: Ops) -> Decoder:
        if ops.name not in loaded:
            loaded[ops.name] = load_decoder(default_model, ops)
        return loaded[ops.name]

    return load


class Answers:
    """Our greedy tokens and the logits (T, V) they were chosen from; the live prompt's answers are kept."""

    def __init__(self, network_of: Callable[[Ops], Decoder]) -> None:
        self._network_of = network_of
        self._live: dict[str, tuple[list[int], mx.array]] = {}

    def __call__(self, ops: Ops, name: str) -> tuple[list[int], mx.array]:
        if name == LIVE and ops.name in self._live:
            return self._live[ops.name]
        network = WatchedNetwork(self._network_of(ops))
        steps = steps_of(ops, name)
        tokens, end = answer(
            network, Request(RECORDED[name].prompt, max_tokens=steps, speculate="off"), context_limit=1024
        )
        assert (len(tokens), end.reason) == (steps, "length")
        found = tokens, mx.concatenate(network.logits_seen)
        if name == LIVE:
            self._live[ops.name] = found
        return found


@pytest.fixture(scope="module")
def answers(network_of: Callable[[Ops], Decoder]) -> Answers:
    return Answers(network_of)


@pytest.mark.sampled
@pytest.mark.parametrize(("ops", "name"), CASES)
def test_greedy_tokens_equal_mlx_lms_record(answers: Answers, ops: Ops, name: str) -> None:
    tokens, logits = answers(ops, name)
    recorded = RECORDED[name]
    for step, best in enumerate(recorded.steps[: len(tokens)]):
        theirs = [logit for _, logit in best]
        ours: list[float] = logits[step, mx.array([token for token, _ in best])].tolist()  # type: ignore[assignment]
        noise = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        assert noise < limit(ops) * float(mx.abs(logits[step]).max().item()), f"step {step}"
        if tokens[step] != recorded.tokens[step]:
            # Moving every logit by up to `noise` can overturn a lead of twice that. From here on the texts differ.
            lead = theirs[0] - dict(best)[tokens[step]]
            assert lead <= 2 * noise, f"step {step}: mlx-lm's token leads by {lead:.5f}, noise is {noise:.5f}"
            break


@pytest.fixture(scope="module")
def peer_logits(default_model: Path) -> Any:
    """tokens -> mlx-lm's logits (T, V), its weights expanded to float32, which MLX multiplies faster."""
    from mlx_lm.utils import dequantize_model, load_model

    model, _ = load_model(default_model, lazy=True)
    model.set_dtype(mx.float32)  # scales first: they are what the expansion computes in
    model = dequantize_model(model)
    done: dict[tuple[int, ...], mx.array] = {}

    def run(tokens: list[int]) -> mx.array:
        if tuple(tokens) not in done:
            done[tuple(tokens)] = model(mx.array([tokens]))[0]
        return done[tuple(tokens)]

    return run


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_all_logits_equal_mlx_lms(answers: Answers, peer_logits: Any, ops: Ops) -> None:
    tokens, mine = (part[:LIVE_STEPS] for part in answers(ops, LIVE))
    theirs = peer_logits([*RECORDED[LIVE].prompt, *tokens[:-1]])[-LIVE_STEPS:]
    assert float((mx.abs(mine - theirs).max() / mx.abs(theirs).max()).item()) < limit(ops)
    assert mx.argmax(theirs, axis=-1).tolist() == tokens


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
def test_chunking_does_not_change_logits(network_of: Callable[[Ops], Decoder], ops: Ops) -> None:
    """Whole, in chunks of 64 or 7, or one by one: the same logits, the same cache. Slow operations do chunks of 7."""
    network = network_of(ops)
    tokens = RECORDED["digits" if ops is not reference else "prose"].prompt
    length = len(tokens)

    def feed(size: int) -> tuple[mx.array, list[mx.array]]:
        cache = new_cache(network, length)
        for done in range(0, length, size):
            part = tokens[done : done + size]
            cache.reserve(len(part))
            hidden = network.layers(network.embed(mx.array([part])), cache)
            cache.advance(len(part))
            cache.commit(len(part))
            mx.eval(cache.arrays)
        return network.logits(hidden), committed_rows(cache)

    whole, whole_rows = feed(length)
    for size in (1, 7, 64) if ops is FAST else (7,):
        cut, rows = feed(size)
        assert float((mx.abs(cut - whole).max() / mx.abs(whole).max()).item()) < limit(ops)
        for a, b in zip(rows, whole_rows, strict=True):
            assert float((mx.abs(a - b).max() / mx.abs(b).max()).item()) < 2 * limit(ops)
