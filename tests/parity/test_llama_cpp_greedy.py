"""Our first 32 greedy tokens on the default model against llama.cpp's, as recorded from the same GGUF.

llama.cpp rounds activations to 8 bits before it multiplies them with 4-bit weights, so its logits carry noise of a few
tenths. How much exactly is told by its second record, the same weights expanded to F32, where nothing is rounded: there
every token has to agree, and on the first record each first difference must be within that noise.
"""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.runtime.engine.request import Request
from tests.support.kernels import FAST
from tests.support.parity_prompts import PROMPTS
from tests.support.recorded_answers import Answer, read
from tests.support.tiny import load_decoder
from tests.support.watched import WatchedNetwork, answer

pytestmark = [pytest.mark.real, pytest.mark.peer]

HERE = Path(__file__).parent
ROUNDED = read(HERE / "llama_cpp_greedy.json")
EXACT = read(HERE / "llama_cpp_f32_greedy.json")
STEPS = 32
# Differences of logits between float32 here and there: sums in another order, and K/V of 11 bits on native kernels.
FLOAT_NOISE = 0.05

Greedy = Callable[[str], tuple[list[int], list[mx.array]]]


@pytest.fixture(scope="module")
def greedy(default_model: Path) -> Greedy:
    """prompt name -> (our 32 tokens, the logits (1, V) each was chosen from)."""
    network = load_decoder(default_model, FAST)
    done: dict[str, tuple[list[int], list[mx.array]]] = {}

    def run(name: str) -> tuple[list[int], list[mx.array]]:
        if name not in done:
            watched = WatchedNetwork(network)
            tokens, _ = answer(
                watched, Request(EXACT[name].prompt, max_tokens=STEPS, speculate="off"), context_limit=1024
            )
            done[name] = tokens, watched.logits_seen
        return done[name]

    return run


def spread(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Return the greatest difference of the two in distances between tokens; a shift of all logits does not count."""
    differences = [ours[token] - theirs[token] for token in ours.keys() & theirs.keys()]
    return max(differences) - min(differences)


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((step for step, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)


def rounding_noise() -> list[float]:
    """The spread between llama.cpp's two records at every step that both reached by the same tokens, ascending."""
    found = []
    for rounded, exact in zip(ROUNDED.values(), EXACT.values(), strict=True):
        shared = first_difference(rounded.tokens, exact.tokens)
        for step in range(STEPS if shared is None else shared + 1):
            found.append(spread(dict(rounded.steps[step]), dict(exact.steps[step])))
    return sorted(found)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROMPTS)
def test_the_same_32_tokens_where_nothing_is_rounded(greedy: Greedy, name: str) -> None:
    tokens, logits = greedy(name)
    assert tokens == EXACT[name].tokens
    for step, best in enumerate(EXACT[name].steps):
        ours = {token: float(logits[step][0, token].item()) for token, _ in best}
        assert spread(ours, dict(best)) < FLOAT_NOISE


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROMPTS)
def test_a_first_difference_is_within_llama_cpps_rounding(greedy: Greedy, name: str) -> None:
    tokens, _ = greedy(name)
    recorded: Answer = ROUNDED[name]
    step = first_difference(tokens, recorded.tokens)
    if step is None:
        return
    best = dict(recorded.steps[step])
    assert tokens[step] in best, f"step {step}: our token is not even among llama.cpp's best"
    lead = max(best.values()) - best[tokens[step]]
    noise = rounding_noise()
    assert lead < noise[len(noise) // 2], f"step {step}: a lead of {lead:.3f}, half of all noise is below"


def test_the_noise_threshold_is_a_rounding_difference() -> None:
    """Were the records of two different models, the spread would be several logits."""
    noise = rounding_noise()
    assert len(noise) > 150
    assert noise[len(noise) // 2] < 0.3
    assert noise[-1] < 1.0
